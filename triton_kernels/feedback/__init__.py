"""Feedback kernels: calibration, acceptance rates, counters, recording."""
