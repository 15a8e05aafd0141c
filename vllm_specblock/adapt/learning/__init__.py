"""Updates of the training copy, and the choice of the serving version."""
