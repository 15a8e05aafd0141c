"""`specblock bench`: methods side by side in vLLM, as in Table 1 of the SpecBlock paper."""
