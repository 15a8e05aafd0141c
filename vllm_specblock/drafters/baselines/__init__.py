"""Drafters of other papers: networks, trees, checkpoints."""
