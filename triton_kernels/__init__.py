"""Triton kernels and their torch references."""
