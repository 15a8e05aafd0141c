"""Adaptive verification: how many nodes of a batch are verified."""
