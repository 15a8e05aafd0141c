"""Verification kernels: tree mask, accepted paths, draft budgets."""
