"""Adaptation while serving (SpecBlock §3.4)."""
