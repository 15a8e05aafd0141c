"""Batches for tests of tree attention: who sees what as sets of entries, and the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.tensors import on
from vllm_specblock.triton_kernels.attention.tree_attention import (
    BatchBounds,
    ScoreOptions,
    VisibleEntries,
)
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch
from vllm_specblock.triton_kernels.attention.tree_attention_reference import tree_attention
from vllm_specblock.triton_kernels.tree.node_bits import pack_bits

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LAYOUTS = {
    "heads first": (0, 1, 2, 3),
    "entries first": (0, 2, 1, 3),
    "heads outside": (1, 0, 2, 3),
}


@dataclass
class Chunk:
    """Plain tokens at the end of `context` entries: a prefill chunk, or a decode step."""

    context: int
    length: int

    @property
    def lens(self) -> tuple[int, int]:
        """Queries and entries."""
        return self.length, self.context + self.length

    def rows(self, generator) -> list[tuple[int, set[int]]]:
        """Per query the length of the prefix that it sees, and the bits of its mask."""
        return [(self.context + i + 1, set()) for i in range(self.length)]


class Tree(Chunk):
    """A root and `nodes` nodes with random parents, after `context` entries."""

    def __init__(self, context: int, nodes: int) -> None:
        super().__init__(context, nodes + 1)

    def rows(self, generator):
        ancestors = [{0}]
        for node in range(1, self.length):
            # Low parents make wide trees, high ones deep trees: take some of both.
            low = int(torch.randint(0, node, (), generator=generator))
            ancestors.append(ancestors[node - 1 if node % 2 else low] | {node})
        return [(self.context, seen) for seen in ancestors]


class Blind(Chunk):
    """Queries that see nothing, as padding does."""

    def __init__(self, length: int) -> None:
        super().__init__(0, length)

    @property
    def lens(self):
        return self.length, 0

    def rows(self, generator):
        return [(0, set())] * self.length


@dataclass
class Batch:
    """What `tree_attention` reads, and what each query sees as a set of entries."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_len: torch.Tensor
    prefix_len: torch.Tensor
    mask_words: torch.Tensor
    tree_start: torch.Tensor
    visible: list[tuple[int, set[int]]]  # per query: its request, the entries that it sees
    value_size: int  # less than the queries' size: keys begin with their values

    def empty(self, device=None) -> torch.Tensor:
        """An output that no row was written to; float32 for queries of 8 bits."""
        shape, eight = (*self.query.shape[:2], self.value_size), self.query.itemsize == 1
        dtype = torch.float32 if eight else None
        return self.query.new_full(shape, torch.nan, device=device, dtype=dtype)

    def arguments(
        self, query_lens=None, max_seq_len=None, unknown_up_to=0, prefix_from=None, **scores
    ):
        tables = self.block_table, self.query_start, self.seq_len, self.prefix_len, prefix_from
        bounds = BatchBounds(
            query_lens or set(self.query_start.diff().tolist()),
            max_seq_len or int(self.seq_len.max()),
            unknown_up_to,
        )
        return (
            self.query,
            self.kv_cache,
            VisibleEntries(*tables, self.mask_words, self.tree_start),
            bounds,
            ScoreOptions(self.query.shape[-1] ** -0.5, **scores),
        )

    def queries(self, **bounds) -> TreeAttentionBatch:
        """The batch as an engine has it."""
        return TreeAttentionBatch(
            self.block_table,
            self.query_start,
            self.query_start.tolist(),
            self.seq_len,
            int(self.seq_len.max()),
            self.prefix_len,
            self.mask_words,
            self.tree_start,
            **bounds,
        )

    def oracle(self, window=None, soft_cap=0.0, key_scale=1.0, value_scale=1.0, sinks=None):
        """Query by query over its set of entries, in float64 -> out.

        What a query sees is consecutive in position, in the order of its entries: the prefix,
        then its path from the root down. A window keeps the last of it. `sinks` [heads] are scores
        of values that are zero.
        """
        num_tokens, num_heads, size = self.query.shape
        group = num_heads // self.kv_cache.shape[1]
        block_size = self.kv_cache.shape[2]
        out = torch.zeros(num_tokens, num_heads, self.value_size, dtype=torch.float64)
        for t, (request, entries) in enumerate(self.visible):
            if not entries:
                continue
            entry = torch.tensor(sorted(entries)[-(window or len(entries)) :])
            block = self.block_table[request].cpu()[entry // block_size].long()
            kv = self.kv_cache.cpu()[block, :, entry % block_size].double()  # [n, nkv, C]
            kv = kv.repeat_interleave(group, 1)
            key, value = kv[..., :size], kv[..., -self.value_size :]
            if self.value_size < size:
                value = kv[..., : self.value_size]
            scores = torch.einsum("nhd,hd->hn", key, self.query[t].cpu().double())
            scores = scores * size**-0.5 * key_scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.cpu().double()[:, None]], 1)
            weights = scores.softmax(1)[:, : len(entry)]
            if self.query.itemsize == 1:  # as FlashAttention 3 rounds them, all in one tile
                unit = weights.amax(1, keepdim=True) / 256
                weights = (weights / unit).to(self.query.dtype).double() * unit
            out[t] = torch.einsum("hn,nhd->hd", weights, value) * value_scale
        return out


def make_batch(
    requests,
    *,
    num_words=1,
    head_size=32,
    num_kv_heads=2,
    group=1,
    block_size=16,
    dtype=torch.float32,
    device="cpu",
    layout="heads first",
    tail=0,
    cache_dtype=None,
    value_size=None,
) -> Batch:
    """A batch of the given requests, `tail` padding tokens at its end, blocks in random order.

    Cache entries that no request owns are NaN, so that reading them cannot go unnoticed.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = torch.Generator().manual_seed(0)  # trees do not depend on the cache's geometry
    lens = [r.lens for r in requests]
    blocks = [-(-entries // block_size) for _, entries in lens]
    order = torch.randperm(sum(blocks) + 3, generator=generator)
    width = head_size if value_size else 2 * head_size
    shape = [len(order), num_kv_heads, block_size, width]
    order_in_memory = LAYOUTS[layout]
    kv_cache = torch.full([shape[d] for d in order_in_memory], torch.nan, dtype=dtype)
    # Every layout above is its own inverse permutation.
    kv_cache = kv_cache.permute(order_in_memory)
    block_table = torch.zeros(len(requests), max(*blocks, 1) + 2, dtype=torch.int32)
    prefix, seen_bits, visible, start = [], [], [], [0]
    taken = 0
    for r, request in enumerate(requests):
        num_queries, num_entries = lens[r]
        own = order[taken : taken + blocks[r]]
        taken += blocks[r]
        block_table[r, : blocks[r]] = own
        entry = torch.arange(num_entries)
        entries = torch.randn(num_entries, num_kv_heads, width, generator=generator)
        entries = entries.to(cache_dtype or dtype).to(dtype)
        kv_cache[own[entry // block_size], :, entry % block_size] = entries
        for prefix_len, bits in request.rows(shapes):
            prefix.append(prefix_len)
            seen_bits.append([j in bits for j in range(64 * num_words)])
            visible.append((r, set(range(prefix_len)) | {request.context + j for j in bits}))
        start.append(start[-1] + num_queries)
    total = start[-1] + tail
    query = torch.randn(total, num_kv_heads * group, head_size, generator=generator)
    rows = torch.int32
    return Batch(
        query.to(device, dtype),
        # `to` keeps the strides of a dense tensor.
        kv_cache.to(device, cache_dtype or dtype),
        block_table.to(device),
        torch.tensor(start, dtype=rows, device=device),
        torch.tensor([entries for _, entries in lens], dtype=rows, device=device),
        torch.tensor(prefix + [0] * tail, dtype=rows, device=device),
        torch.nn.functional.pad(pack_bits(torch.tensor(seen_bits)), (0, 0, 0, tail)).to(device),
        torch.tensor([r.context for r in requests], dtype=rows, device=device),
        visible,
        value_size or head_size,
    )


def check(got: torch.Tensor, batch: Batch, largest: float = 1.0, **rare) -> None:
    """`rare` as in `Batch.oracle`; the values are `largest` times as large as usual."""
    tolerance, wanted = TOLERANCE[batch.query.dtype], batch.oracle(**rare)
    near = {"atol": largest * tolerance, "rtol": tolerance}
    assert got.dtype == batch.query.dtype
    torch.testing.assert_close(got.cpu().double(), wanted, **near, check_dtype=False)


def reference(batch: Batch, **options) -> torch.Tensor:
    """The torch reference, on the CPU; `options` as in `Batch.arguments`."""
    out = batch.empty("cpu")
    return tree_attention.reference(*on("cpu", batch.arguments(**options)), out)


MIXED = [Chunk(5, 19), Tree(37, 12), Chunk(20, 1), Tree(3, 9), Chunk(0, 4)]


def launch(kernels, batch: Batch, out=None, **options) -> torch.Tensor:
    out = batch.empty() if out is None else out
    module = kernels.load("tree_attention")
    return module.tree_attention_triton(*batch.arguments(**options), out)
