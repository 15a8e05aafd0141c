"""Kernels of drafter layers: norms, RoPE, 8-bit linears, LM and rank heads."""
