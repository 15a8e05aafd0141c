"""Tables and plots of the commands."""
