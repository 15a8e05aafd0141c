"""Tree attention over a paged KV cache."""
