"""The only folder that imports vLLM: one decode step of the plugin inside Model Runner V2."""
