"""Continuations of a text's end that stand earlier in the text."""
