"""The frozen target: its answers, its features, and where they are kept."""
