"""SpecBlock drafters: network, tree growth, checkpoints."""
