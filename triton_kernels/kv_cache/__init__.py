"""Keys and values: stored, and brought together once a path is accepted."""
