"""Pictures of drafting: trees, accepted text and acceptance rates. Nothing here serves."""
