"""Growing a tree block by block, or level by level, and what its rows see."""
