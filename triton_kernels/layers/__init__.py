"""What the layers of drafters are computed with: norms, RoPE, products in 8 bits, both heads."""
