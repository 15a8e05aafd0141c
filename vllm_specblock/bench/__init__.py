"""What a drafter is worth, as tables and figures."""
