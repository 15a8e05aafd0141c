"""Checks for problems that prevent drafting, before an engine starts."""
