"""All that only a CPU needs of the engine: kernels of Model Runner V2 and vLLM's CPU platform."""
