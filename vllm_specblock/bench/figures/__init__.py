"""Draft trees, acceptance rates and shaded answers as pictures."""
