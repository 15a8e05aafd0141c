"""What only a CPU needs: its attention, compiled loops, and replacements of vLLM's kernels."""
