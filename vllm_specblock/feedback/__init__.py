"""Online estimators: everything that learns from verification results."""
