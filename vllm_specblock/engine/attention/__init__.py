"""vLLM attention backend for draft trees."""
