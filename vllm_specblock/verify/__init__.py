"""From what the target said at every node to the accepted path."""
