"""`specblock`: the command line."""
