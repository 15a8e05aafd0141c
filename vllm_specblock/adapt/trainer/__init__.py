"""The trainer's process."""
