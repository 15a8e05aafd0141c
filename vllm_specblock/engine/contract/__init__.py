"""What the plugin leans on in vLLM, as data: held against sources that are not run."""
