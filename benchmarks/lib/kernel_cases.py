"""Shapes of our kernels, and every way to run each: ours, FlashAttention's, torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm_specblock.triton_kernels.attention import attention_schedule
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch
from vllm_specblock.triton_kernels.feedback.record_step import record_step
from vllm_specblock.triton_kernels.feedback.slab_tensors import SlabTensors, StepToRecord
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows, KVCacheSet, move_kv
from vllm_specblock.triton_kernels.layers.fp8_linear import fp8_linear, quantize
from vllm_specblock.triton_kernels.layers.layer_shift import layer_shift, shift
from vllm_specblock.triton_kernels.tree.candidate_keys import DEPTH_ONE, ROOT_HASH
from vllm_specblock.triton_kernels.verify.verification_result import VerificationResult

from lib.acceptance import synthetic_tree
from vllm_specblock.candidates import extend_hash, rank_key, select
from vllm_specblock.commit.committed_tokens import committed_sources
from vllm_specblock.commit.move import move_path
from vllm_specblock.drafters.specblock.tree_shape import TreeShape

BLOCK = 16
"""Tokens in one block of the paged cache."""
TREE_SHAPE = (4, 2, 8, (4, 8, 16, 16))
"""K, M, S and branching of the trees."""
ALPHA = [0.8, 0.7, 0.6, 0.5] * 2


@dataclass(frozen=True)
class Sizes:
    """What is measured: of the target's attention, of the trees, of the drafter.

    Attributes:
        heads, kv_heads, head_dim: of the target; nodes: N.
        contexts, batches: of attention; layers: caches that a commit moves in.
        hidden, inner: H and the MLP's width; rows: T, rows of a drafter forward.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    nodes: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    layers: int
    hidden: int
    inner: int
    rows: tuple[int, ...]


LARGE = Sizes(
    torch.bfloat16,
    32,
    8,
    128,
    60,
    (512, 2048, 8192, 32768),
    (1, 2, 4, 8, 16, 32),
    32,
    4096,
    14336,
    (1, 4, 8, 16, 32, 64),
)
TINY = Sizes(torch.float32, 4, 2, 16, 12, (40,), (1, 2), 2, 32, 48, (1, 3))


@dataclass(frozen=True)
class Case:
    """One shape of one kernel.

    Attributes:
        kernel, shape: its name and what tells it from the kernel's other cases.
        ways: how to run it, ours first under "ours"; each gives what it computed, or None where
            it works in place.
        moved: bytes that any way has to read and write.
    """

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
    tree = synthetic_tree(TreeShape(*TREE_SHAPE, sizes.nodes), ALPHA)
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
    packed = TreeAttentionBatch(
        table,
        BLOCK,
        start,
        start_host,
        lengths,
        [length] * batch,
        torch.full((batch * queries,), context, dtype=torch.int32, device=device),
        tree.ancestors.to(device).expand(batch, -1, -1).flatten(0, 1).contiguous(),
        torch.full((batch,), context, dtype=torch.int32, device=device),
    )
    scale, cache = sizes.head_dim**-0.5, storage.transpose(1, 2)
    ways = {"ours": lambda: packed.attend(query, cache, scale)}
    for entries in splits:
        ways[f"ours, splits of {entries}"] = _with_splits(entries, ways["ours"])
    if device.type == "cuda":
        ways["FlashAttention, chain"] = _flash(query, storage, start, lengths, length, table)
    ways["torch SDPA, dense"] = _dense(sizes, query, storage, table, tree.ancestors, context)
    entries = batch * length * sizes.kv_heads * 2 * sizes.head_dim
    moved = (entries + 2 * query.numel()) * sizes.dtype.itemsize
    return Case("tree attention", f"context {context}, batch {batch}", ways, moved)


def _with_splits(entries: int, attend: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        usual, attention_schedule.SPLIT_ENTRIES = attention_schedule.SPLIT_ENTRIES, entries
        try:
            return attend()
        finally:
            attention_schedule.SPLIT_ENTRIES = usual

    return run


def _flash(query, storage, start, lengths, length, table) -> Callable[[], Tensor]:
    """vLLM's bundled FlashAttention, version 3 where the device has it, over its own layout."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    key, value = (each.contiguous() for each in storage.chunk(2, dim=-1))
    out, queries = torch.empty_like(query), len(query) // len(table)
    return lambda: flash_attn_varlen_func(
        query,
        key,
        value,
        queries,
        start,
        length,
        seqused_k=lengths,
        causal=True,
        block_table=table,
        out=out,
        fa_version=get_flash_attn_version(),
    )


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


def shift_case(sizes: Sizes, rows: int, device: torch.device) -> Case:
    """The drafter's layer shift over `rows` rows of K positions, and the norm that comes next."""
    draw = torch.Generator(device).manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, generator=draw, device=device).to(sizes.dtype)
        for shape in ((rows, TREE_SHAPE[0], sizes.hidden), (sizes.hidden, 2 * sizes.hidden))
    )
    norm = nn.RMSNorm(sizes.hidden, eps=1e-5, dtype=sizes.dtype, device=device)

    def reference() -> tuple[Tensor, Tensor]:
        shifted = shift.reference(hidden, weight)
        return shifted, norm(shifted)

    return Case(
        "layer shift",
        f"T {rows}, K {TREE_SHAPE[0]}, H {sizes.hidden}",
        {
            "ours": lambda: layer_shift(hidden, weight, norm),
            "torch, concatenation": reference,
        },
        (weight.numel() + 3 * hidden.numel()) * sizes.dtype.itemsize,
    )


def linear_case(sizes: Sizes, rows: int, device: torch.device) -> Case:
    """A projection of the drafter's MLP over `rows` rows, weights in 8 bits and in full."""
    draw = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=draw, device=device)
        for shape in ((rows * TREE_SHAPE[0], sizes.hidden), (sizes.inner, sizes.hidden))
    )
    short, scale = quantize(weight)
    x, weight = x.to(sizes.dtype), (short.float() * scale[:, None]).to(sizes.dtype)
    return Case(
        "linear, 8 bits",
        f"T {len(x)}, {sizes.inner} × {sizes.hidden}",
        {"ours": lambda: fp8_linear(x, short, scale), "torch, full": lambda: F.linear(x, weight)},
        short.nbytes + (x.numel() + len(x) * sizes.inner) * sizes.dtype.itemsize,
    )


def commit_case(sizes: Sizes, batch: int, device: torch.device) -> Case:
    """Paths of 8 nodes, scattered over the tree, moved to the front in every layer's cache."""
    depth = min(8, sizes.nodes)
    blocks = -(-(sizes.nodes + 1) // BLOCK)
    caches = [
        torch.randn(batch * blocks, BLOCK, sizes.kv_heads, 2 * sizes.head_dim, device=device)
        .to(sizes.dtype)
        .transpose(1, 2)
        for _ in range(sizes.layers)
    ]
    first = torch.arange(batch, device=device) * blocks * BLOCK  # a request's first row and slot
    path = torch.arange(depth + 1, device=device) * sizes.nodes // depth
    one, whole = torch.ones_like(first), torch.full_like(first, depth, dtype=torch.int32)
    rows = AcceptedRows(first, one, path.expand(batch, -1), whole)
    source, target, moves = committed_sources(rows)
    together = KVCacheSet(caches)
    slots = torch.arange(batch * blocks * BLOCK, device=device)
    entry = sizes.layers * sizes.kv_heads * 2 * sizes.head_dim * sizes.dtype.itemsize
    return Case(
        "commit",
        f"batch {batch}, {depth} rows, {sizes.layers} layers",
        {
            "ours": lambda: move_path(together, slots, rows, len(slots)),
            "torch, gather and scatter": lambda: move_kv(together, source, target, moves),
        },
        2 * entry * int(moves.sum()),
    )


def record_case(sizes: Sizes, batch: int, device: torch.device) -> Case:
    """Four rows of every request into slabs, and its sums; see `adapt/slabs.py`."""
    rows, slabs = 4, SlabTensors.empty(batch, 256, sizes.hidden, batch, sizes.dtype, device)
    request = torch.arange(batch, device=device)
    slabs.of_slot.copy_(request)
    states = torch.randn(batch * rows, 4 * sizes.hidden, device=device).to(sizes.dtype)
    low, mid, high, last = states.chunk(4, -1)
    row = torch.arange(batch * rows, device=device)
    origin = torch.ones(batch, sizes.nodes, dtype=torch.uint8, device=device)
    ones = torch.ones_like(request)
    verified = VerificationResult(
        request,
        rows * ones,
        (rows - 1) * ones.int(),
        row[:rows].expand(batch, -1),
        None,
        origin,
        None,
    )
    step = StepToRecord(
        row // rows,
        row,
        row,
        row % rows,
        row,
        rows * request + rows - 1,
        (low, mid, high),
        last,
        verified,
        torch.zeros_like(origin, dtype=torch.int32),
    )
    return Case(
        "recording",
        f"batch {batch}, {rows} rows each",
        {
            "ours": lambda: record_step(slabs, step),
            "torch, all slabs rewritten": lambda: record_step.reference(slabs, step),
        },
        2 * states.nbytes,
    )


def expansion_case(sizes: Sizes, batch: int, device: torch.device) -> Case:
    """From the candidates of M blocks to the best N nodes in order."""
    ways, moved = random_candidates(TreeShape(*TREE_SHAPE, sizes.nodes), batch, device)
    return Case("tree selection", f"batch {batch}, N {sizes.nodes}", ways, moved)


def random_candidates(
    shape: TreeShape, batch: int, device: torch.device
) -> tuple[dict[str, Callable[[], Any]], int]:
    """Ways to make trees of them, and the bytes that each has to read and write.

    As many candidates as `shape` has cells, evenly over its depths, each below a random one of
    the depth before; tokens of a vocabulary of 64, so that some texts are equal.
    """
    draw = torch.Generator(device).manual_seed(0)
    levels = shape.max_depth
    width = shape.num_rows * shape.block_size * shape.width // levels
    token = torch.randint(64, (batch, levels, width), generator=draw, device=device)
    gain = torch.rand(batch, levels, width, generator=draw, device=device).log()
    chosen = torch.randint(width, (batch, levels, width), generator=draw, device=device)
    score, path_hash = torch.zeros_like(gain), torch.full_like(token, ROOT_HASH)
    parent = torch.zeros_like(token)
    for level in range(levels):
        above = 0, path_hash[:, level]
        if level:
            up = chosen[:, level]
            above = score[:, level - 1].gather(1, up), path_hash[:, level - 1].gather(1, up)
            parent[:, level] = up + 1 + (level - 1) * width
        score[:, level] = above[0] + gain[:, level]
        path_hash[:, level] = extend_hash(above[1], token[:, level])
    place = torch.arange(1, levels * width + 1, device=device)
    depth = torch.arange(1, levels + 1, device=device).repeat_interleave(width)
    key = rank_key(score.flatten(1), (depth * DEPTH_ONE + place).expand(batch, -1))
    fields = (
        F.pad(token.flatten(1), (1, 0)),
        F.pad(parent.flatten(1), (1, 0)),
        F.pad(score.flatten(1), (1, 0)),
        F.pad(key, (1, 0)),
        F.pad(path_hash.flatten(1), (1, 0), value=ROOT_HASH),
    )
    ways = {
        "ours": lambda: select(*fields, shape.budget, levels),
        "torch": lambda: select.reference(*fields, shape.budget, levels),
    }
    tree = ways["torch"]().tree
    written = sum(getattr(tree, name).nbytes for name in tree.TENSORS)
    return ways, sum(field.nbytes for field in fields) + written


def cases(sizes: Sizes, device: torch.device, splits: Sequence[int] = ()) -> Iterator[Case]:
    """One after the other: the largest take most of a GPU's memory."""
    for context in sizes.contexts:
        for batch in sizes.batches:
            yield attention_case(sizes, context, batch, device, splits)
    for rows in sizes.rows:
        yield shift_case(sizes, rows, device)
        yield linear_case(sizes, rows, device)
    for batch in sizes.batches:
        yield commit_case(sizes, batch, device)
        yield expansion_case(sizes, batch, device)
        yield record_case(sizes, batch, device)
