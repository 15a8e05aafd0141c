"""Drafters: what yields a draft tree for every request. Plain torch."""
