"""Attention over a paged cache: the committed prefix, and of the tree what lies on the path."""
