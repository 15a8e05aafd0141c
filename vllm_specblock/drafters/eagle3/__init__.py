"""EAGLE-3 heads: existing checkpoints (arXiv 2503.01840) under EAGLE-2's tree (2406.16858)."""
