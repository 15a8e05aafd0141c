"""Weights that change while an engine serves: which, when, and on all ranks at once."""
