"""Triton kernels, each beside the torch reference that it is held to."""
