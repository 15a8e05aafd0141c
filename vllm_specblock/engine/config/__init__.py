"""Engine arguments: parse, validate, resolve."""
