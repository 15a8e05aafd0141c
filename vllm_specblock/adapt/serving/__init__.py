"""The engine's side of adaptation: what is recorded, and how versions come to serve."""
