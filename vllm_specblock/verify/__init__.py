"""Verification of draft trees: masks, accepted paths, recurrent layers."""
