"""Tree growth by blocks or levels, and its attention metadata."""
