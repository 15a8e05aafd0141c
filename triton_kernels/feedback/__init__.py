"""What verdicts teach: calibration, acceptance rates, counters, the lazy gate."""
