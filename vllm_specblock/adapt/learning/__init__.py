"""Updates of the training copy, and what decides which version serves."""
