"""The frozen target: answers, features and their storage."""
