"""Evaluation of a drafter, without serving it."""
