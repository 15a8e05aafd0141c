"""Adaptation policies: when to update the drafter, and how much of it."""
