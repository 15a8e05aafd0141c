"""What verdicts teach: calibration, acceptance rates, counters."""
