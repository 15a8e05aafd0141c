"""Triton kernels and their references."""
