"""Offline engines: answers, features."""
