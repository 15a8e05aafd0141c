"""What several benchmarks share; a command each is one folder up, which Python then looks in."""
