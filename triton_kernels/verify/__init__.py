"""The mask of a step's trees, the walk along the target's draws, and the verdicts."""
