"""Speculation counters and their exporters."""
