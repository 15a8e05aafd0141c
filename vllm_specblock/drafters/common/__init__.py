"""What drafters share: configs and checkpoints, layers, attention, missed rows."""
