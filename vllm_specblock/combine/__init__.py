"""Combination of two drafters' trees: routing or merging."""
