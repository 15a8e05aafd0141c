"""Trees through the recurrent layers of hybrid targets."""
