"""Which rows and slots move where once a path is accepted: index arithmetic only."""
