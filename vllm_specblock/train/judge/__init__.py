"""How good a drafter is, without serving it."""
