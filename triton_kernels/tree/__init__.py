"""Trees as tensors: chosen from candidates, merged, copied, kept by request slot."""
