"""`python -m vllm_specblock` is `specblock`: what torchrun can start on many devices."""

from vllm_specblock.cli.main import app

app()
