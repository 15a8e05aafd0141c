"""The trees of two drafters become the one that is verified: by choosing, or by joining."""
