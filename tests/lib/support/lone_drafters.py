"""Heads of the example checkpoints, with caches of their own, without an engine."""

from __future__ import annotations

import torch
from support.engines import DRAFTER, ROOT

from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.eagle3.model import FILES as EAGLE3
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.options import Eagle3Config, SpecBlockConfig
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter

PAGE, MAX_LEN = 8, 128


def head_of(kind: str) -> tuple[Drafter, int]:
    """A head of 24 nodes with room for 39 blocks in its caches, and the target's width."""
    if kind == "eagle3":
        drafter = EAGLE3.load(ROOT / "examples/two_heads/eagle3", dtype=torch.float32)
        make, options, layers = Eagle3Drafter, Eagle3Config(), 1
        shape, entries = drafter.config, 1
    else:
        drafter = checkpoint.load(DRAFTER, torch.float32, "cpu")
        make, options, layers = SpecBlockDrafter, SpecBlockConfig(), 2
        shape, entries = drafter.config, drafter.config.block_size
    table = torch.randn(2048, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    head = make(drafter.eval(), lambda ids: table[ids], options, 24, MAX_LEN)
    size = (40, PAGE * entries, shape.num_key_value_heads, 2 * shape.head_dim)
    # Noise: nothing of it may be seen. It is the same in every head, and no NaN: a reference reads
    # whole pages, and trees of NaN are empty, and empty trees are equal.
    draw = torch.Generator().manual_seed(3)
    head.bind([torch.randn(size, generator=draw).transpose(1, 2) for _ in range(layers)])
    return head, shape.target_hidden_size
