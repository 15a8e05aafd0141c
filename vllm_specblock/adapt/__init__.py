"""Adaptation while serving: what is kept of requests, and what is learned (SpecBlock §3.4)."""
