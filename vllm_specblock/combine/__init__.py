"""The trees of two heads become the one that is verified: by choosing, or by joining."""
