"""One step of the engine: propose, verify, sample, commit."""
