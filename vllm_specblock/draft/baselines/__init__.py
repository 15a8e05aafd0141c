"""Drafters of other papers as heads: their networks, their trees, their files."""
