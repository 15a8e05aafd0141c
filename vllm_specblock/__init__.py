"""Tree speculative decoding for vLLM: SpecBlock drafters, verified exactly."""
