"""Online estimators that learn from verification results."""
