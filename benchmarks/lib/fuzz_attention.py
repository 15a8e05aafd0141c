"""Random cases of tree attention: over caches packed for a CPU, and over paged ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm_specblock.triton_kernels.attention.cpu_packing import packing_of, store_packed
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

from lib.fuzz_case import MOST_REQUESTS, Case, Tensors
from vllm_specblock.tree import climb


class Attention(NamedTuple):
    """Queries of random trees behind prefixes of any length.

    Attributes (T queries, R requests):
        requests: R.
        batch: a new one; what it has worked out for one form is not the other's.
        query: [T, heads, D]; cache: [blocks, kv heads, block size, 2D].
        rare: further arguments of `attend`.
        atol: of this dtype.
    """

    requests: int
    batch: Callable[[], TreeAttentionBatch]
    query: torch.Tensor
    cache: torch.Tensor
    rare: dict[str, Any]
    atol: float

    def attend(self, cache: torch.Tensor, **packing: Any) -> Tensors:
        scale = self.query.shape[-1] ** -0.5
        return (self.batch().attend(self.query, cache, scale, **packing, **self.rare).float(),)


def draw_attention(rng: random.Random, draw: torch.Generator) -> Attention:
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

    def batch() -> TreeAttentionBatch:
        return TreeAttentionBatch(
            tables,
            start,
            start.tolist(),
            length,
            int(length.max()),
            before.repeat_interleave(rows),
            climb(parent)[0].flatten(0, 1),
            before,
        )

    rare = {"window": window, "soft_cap": soft_cap}
    return Attention(requests, batch, query, cache.transpose(1, 2), rare, atol)


def packed_attention(rng: random.Random, draw: torch.Generator) -> Case:
    """In caches packed for a CPU, against plain ones in torch."""
    drawn = draw_attention(rng, draw)
    packed = torch.zeros_like(drawn.cache)
    packing = packing_of(packed, False)
    key, value = drawn.cache.transpose(1, 2).flatten(0, 1).chunk(2, dim=-1)
    store_packed(packed, packing, torch.arange(len(key)), key, value)
    return Case(
        drawn.requests,
        lambda: drawn.attend(packed, packing=packing),
        drawn.atol,
        lambda: drawn.attend(drawn.cache),
    )


def paged_attention(rng: random.Random, draw: torch.Generator) -> Case:
    """In paged caches.

    Triton's interpreter cuts off what bfloat16 has no bits for instead of rounding: of weights, and
    of the result. Each costs up to one step, 2⁻⁷ of a value.
    """
    drawn = draw_attention(rng, draw)
    atol = drawn.atol
    if drawn.query.dtype == torch.bfloat16:
        atol = 2**-6 * float(drawn.cache.abs().max())
    return Case(drawn.requests, lambda: drawn.attend(drawn.cache), atol)
