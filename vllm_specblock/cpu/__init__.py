"""CPU support: attention, compiled loops, replacements of vLLM's kernels."""
