"""KV cache kernels: commit of accepted paths, committed tokens, incomplete blocks."""
