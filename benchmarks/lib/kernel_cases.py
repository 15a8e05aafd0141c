"""Tree attention and 8-bit linear layers, and every way to run each: ours and others'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm_specblock.triton_kernels.attention import attention_schedule
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch
from vllm_specblock.triton_kernels.layers.fp8_linear import fp8_linear, quantize

from lib.acceptance import PAPER_TREE, synthetic_tree

BLOCK = 16
"""Tokens in one block of the paged cache."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the target's attention, the trees and the drafter; hidden, inner: H and the MLP's
    width; rows: T, rows of a drafter forward."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    nodes: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    hidden: int
    inner: int
    rows: tuple[int, ...]


_CONTEXTS, _BATCHES, _ROWS = (512, 2048, 8192, 32768), (1, 2, 4, 8, 16, 32), (1, 4, 8, 16, 32, 64)
LARGE = Sizes(torch.bfloat16, 32, 8, 128, 60, _CONTEXTS, _BATCHES, 4096, 14336, _ROWS)
TINY = Sizes(torch.float32, 4, 2, 16, 12, (40,), (1, 2), 32, 48, (1, 3))


@dataclass(frozen=True)
class Case:
    """One shape of one kernel, the ways to run it, ours first, and the bytes that each moves."""

    kernel: str
    shape: str
    ways: dict[str, Callable[[], Any]]
    moved: int


def attention_case(
    sizes: Sizes, context: int, batch: int, device: torch.device, splits: Sequence[int] = ()
) -> Case:
    """A root and its tree behind `context` tokens, `batch` times; FlashAttention: a chain.

    splits: in place of SPLIT_ENTRIES, each one way more.
    """
    queries = sizes.nodes + 1
    tree = synthetic_tree(replace(PAPER_TREE, budget=sizes.nodes), [0.8, 0.7, 0.6, 0.5] * 2)
    length = context + queries
    blocks = -(-length // BLOCK)
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device).to(sizes.dtype)

    # The engine's layout: entries outside, heads inside (LBNHC).
    storage = random(batch * blocks, BLOCK, sizes.kv_heads, 2 * sizes.head_dim)
    order = torch.randperm(batch * blocks, generator=draw, device=device).int()
    table = order.view(batch, blocks)
    query = random(batch * queries, sizes.heads, sizes.head_dim)
    start_host = [queries * request for request in range(batch + 1)]
    start = torch.tensor(start_host, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    before = torch.full((batch * queries,), context, dtype=torch.int32, device=device)
    words = tree.ancestors.to(device).expand(batch, -1, -1).flatten(0, 1).contiguous()
    packed = TreeAttentionBatch(
        table, start, start_host, lengths, length, before, words, before[:batch]
    )
    scale, cache = sizes.head_dim**-0.5, storage.transpose(1, 2)
    ways = {"ours": lambda: packed.attend(query, cache, scale)}
    for entries in splits:
        split = patch.object(attention_schedule, "SPLIT_ENTRIES", entries)
        ways[f"ours, splits of {entries}"] = split(lambda: ways["ours"]())
    if device.type == "cuda":
        ways["FlashAttention, chain"] = _flash(query, storage, start, lengths, length, table)
    ways["torch SDPA, dense"] = _dense(sizes, query, storage, table, tree.ancestors, context)
    entries = batch * length * sizes.kv_heads * 2 * sizes.head_dim
    moved = (entries + 2 * query.numel()) * sizes.dtype.itemsize
    return Case("tree attention", f"context {context}, batch {batch}", ways, moved)


def _flash(query, storage, start, lengths, length, table) -> Callable[[], Tensor]:
    """vLLM's bundled FlashAttention, version 3 where the device has it, over its own layout."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    key, value = (each.contiguous() for each in storage.chunk(2, dim=-1))
    out, queries = torch.empty_like(query), len(query) // len(table)
    given = {"seqused_k": lengths, "causal": True, "block_table": table, "out": out}
    given["fa_version"] = get_flash_attn_version()
    return lambda: flash_attn_varlen_func(query, key, value, queries, start, length, **given)


def _dense(sizes, query, storage, table, ancestors, context) -> Callable[[], Tensor]:
    """Torch's attention on keys and values that lie in order already, with the tree's mask."""
    batch, queries = len(table), sizes.nodes + 1
    dense = storage[table.long()].flatten(1, 2)[:, : context + queries].transpose(1, 2)
    key, value = (each.contiguous() for each in dense.chunk(2, dim=-1))
    shift = torch.arange(queries)
    tree = (ancestors[0][:, shift // 64] >> (shift % 64)) & 1  # [N+1, N+1]
    mask = F.pad(tree.bool(), (context, 0), value=True).to(query.device)
    rows = query.view(batch, queries, sizes.heads, -1).transpose(1, 2)
    return lambda: (
        F.scaled_dot_product_attention(rows, key, value, mask, enable_gqa=True)
        .transpose(1, 2)
        .flatten(0, 1)
    )


def linear_case(sizes: Sizes, rows: int, device: torch.device) -> Case:
    """A projection of the drafter's MLP over `rows` rows, weights in 8 bits and in full."""
    draw = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=draw, device=device)
        for shape in ((rows * PAPER_TREE.block_size, sizes.hidden), (sizes.inner, sizes.hidden))
    )
    short, scale = quantize(weight)
    x, weight = x.to(sizes.dtype), (short.float() * scale[:, None]).to(sizes.dtype)
    return Case(
        "linear, 8 bits",
        f"T {len(x)}, {sizes.inner} × {sizes.hidden}",
        {"ours": lambda: fp8_linear(x, short, scale), "torch, full": lambda: F.linear(x, weight)},
        short.nbytes + (x.numel() + len(x) * sizes.inner) * sizes.dtype.itemsize,
    )


def cases(sizes: Sizes, device: torch.device, splits: Sequence[int] = ()) -> Iterator[Case]:
    """One after the other: the largest take most of a GPU's memory."""
    for context in sizes.contexts:
        for batch in sizes.batches:
            yield attention_case(sizes, context, batch, device, splits)
    for rows in sizes.rows:
        yield linear_case(sizes, rows, device)
