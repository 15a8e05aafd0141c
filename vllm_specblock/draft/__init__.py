"""Heads: what proposes a draft tree. Plain torch."""
