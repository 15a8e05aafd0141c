"""Engine side of adaptation: recording, and swaps of versions."""
