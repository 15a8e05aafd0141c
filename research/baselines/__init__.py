"""Drafters of other papers: networks, trees, checkpoints, and how they are trained."""
