"""Random cases of tree attention: over caches packed for a CPU, and over paged ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from vllm_specblock.triton_kernels.attention.cpu_packing import packing_of, store_packed
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

from lib.fuzz_case import MOST_REQUESTS, Case, Tensors
from vllm_specblock.tree import climb

Attend = Callable[..., Tensors]
"""(cache, further arguments of `TreeAttentionBatch.attend`) -> the result."""


def draw_attention(
    rng: random.Random, draw: torch.Generator
) -> tuple[int, torch.Tensor, Attend, float]:
    """Draw queries of random trees behind prefixes of any length.

    Returns:
        requests, the cache [blocks, kv heads, block size, 2D], the call, and the dtype's tolerance.
    """
    requests, nodes = rng.randrange(1, MOST_REQUESTS + 1), rng.randrange(1, 80)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 3, 4])
    size, block = rng.choice([32, 64, 96]), rng.choice([32, 64])
    dtype, atol = rng.choice([(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
    window, soft_cap = rng.choice([None, None, rng.randrange(1, 90)]), rng.choice([0.0, 0.0, 20.0])
    rows = nodes + 1
    before = torch.tensor([rng.choice([0, rng.randrange(200)]) for _ in range(requests)]).int()
    length = before + rows
    per = -(-int(length.max()) // block)
    tables = (torch.randperm(requests * per, generator=draw) + 1).view(requests, per).int()
    shape = requests * per + 1, block, kv_heads, 2 * size
    cache = torch.randn(shape, generator=draw).to(dtype)
    query = torch.randn(requests * rows, kv_heads * group, size, generator=draw).to(dtype)
    parent = (torch.rand(requests, nodes, generator=draw) * torch.arange(1, rows)).int()
    start = torch.arange(requests + 1, dtype=torch.int32) * rows

    def attend(cache: torch.Tensor, **packing: Any) -> Tensors:
        # A new batch: it keeps values that only one of the forms can use.
        batch = TreeAttentionBatch(
            tables,
            start,
            start.tolist(),
            length,
            int(length.max()),
            before.repeat_interleave(rows),
            climb(parent)[0].flatten(0, 1),
            before,
        )
        given = {"window": window, "soft_cap": soft_cap, **packing}
        return (batch.attend(query, cache, size**-0.5, **given).float(),)

    return requests, cache.transpose(1, 2), attend, atol


def packed_attention(rng: random.Random, draw: torch.Generator) -> Case:
    """In caches packed for a CPU, against plain ones in torch."""
    requests, cache, attend, atol = draw_attention(rng, draw)
    packed = torch.zeros_like(cache)
    packing = packing_of(packed, False)
    key, value = cache.transpose(1, 2).flatten(0, 1).chunk(2, dim=-1)
    store_packed(packed, packing, torch.arange(len(key)), key, value)
    return Case(requests, lambda: attend(packed, packing=packing), atol, lambda: attend(cache))


def paged_attention(rng: random.Random, draw: torch.Generator) -> Case:
    """In paged caches.

    Triton's interpreter truncates to bfloat16 instead of rounding: the weights, and the result.
    Each costs up to one step, 2⁻⁷ of a value.
    """
    requests, cache, attend, atol = draw_attention(rng, draw)
    if cache.dtype == torch.bfloat16:
        atol = 2**-6 * float(cache.abs().max())
    return Case(requests, lambda: attend(cache), atol)
