"""JetSpec: a DFlash drafter whose blocks are causal, drafting trees (arXiv 2606.18394)."""
