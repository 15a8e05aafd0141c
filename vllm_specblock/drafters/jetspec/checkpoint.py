"""JetSpec checkpoints: DFlash's files, whose config.json says that blocks are causal."""

from __future__ import annotations

from functools import partial

from vllm_specblock.drafters.dflash import checkpoint

read_config = partial(checkpoint.read_config, causal=True)
check_tensors = checkpoint.check_tensors
load = partial(checkpoint.load, causal=True)
