"""Heads of the example checkpoints, with caches of their own, without an engine."""

from __future__ import annotations

import torch
from support.engines import DRAFTER, EAGLE3

from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import drafter_kind

PAGE, MAX_LEN = 8, 128


def head_of(kind: str) -> tuple[Drafter, int]:
    """A head of 24 nodes with room for 39 blocks in its caches, and the target's width."""
    made, folder = drafter_kind(kind), DRAFTER if kind == "specblock" else EAGLE3["model"]
    model = made.load_checkpoint_module().load(folder, dtype=torch.float32).eval()
    shape = model.config
    table = torch.randn(2048, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    head = made.load_class()(model, lambda ids: table[ids], made.options(), 24, MAX_LEN)
    size = (40, PAGE * head.entries_per_token, shape.num_key_value_heads, 2 * shape.head_dim)
    # Noise: nothing of it may be seen. It is the same in every head, and no NaN: a reference reads
    # whole pages, and trees of NaN are empty, and empty trees are equal.
    draw = torch.Generator().manual_seed(3)
    head.bind([torch.randn(size, generator=draw).transpose(1, 2) for _ in head.cache_layers()])
    return head, shape.target_hidden_size
