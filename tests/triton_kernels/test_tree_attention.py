"""One visibility rule for prefill, decode, trees and draft blocks, held to a set-based oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from vllm_specblock.triton_kernels.tree_attention import tree_attention
from vllm_specblock.triton_kernels.tree_attention_reference import (
    MAX_BATCHED_QUERY,
    attend_reference,
    plan_reference,
)

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

    def lens(self):
        return self.length, self.context + self.length

    def rows(self, generator):
        return [(self.context + i + 1, set()) for i in range(self.length)]


@dataclass
class Tree:
    """A root and `nodes` nodes with random parents after `context` entries."""

    context: int
    nodes: int

    def lens(self):
        return self.nodes + 1, self.context + self.nodes + 1

    def rows(self, generator):
        ancestors = [{0}]
        for node in range(1, self.nodes + 1):
            # Low parents make wide trees, high ones deep trees: take some of both.
            low = int(torch.randint(0, node, (), generator=generator))
            ancestors.append(ancestors[node - 1 if node % 2 else low] | {node})
        return [(self.context, seen) for seen in ancestors]


@dataclass
class Blind:
    """Queries that see nothing, as padding does."""

    length: int

    def lens(self):
        return self.length, 0

    def rows(self, generator):
        return [(0, set())] * self.length


@dataclass
class Batch:
    """Arguments of `tree_attention`, and what each query sees as a set of entries."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_len: torch.Tensor
    prefix_len: torch.Tensor
    words: torch.Tensor
    window_start: torch.Tensor
    visible: list[tuple[int, set[int]]]  # per query: its request, the entries that it sees

    def arguments(self):
        longest = int((self.query_start[1:] - self.query_start[:-1]).max())
        return (
            self.query, self.kv_cache, self.block_table, self.query_start, longest, self.seq_len,
            int(self.seq_len.max()), self.prefix_len, self.words, self.window_start,
            self.query.shape[-1] ** -0.5,
        )  # fmt: skip

    def oracle(self):
        """Query by query over its set of entries, in float64."""
        num_tokens, num_heads, size = self.query.shape
        group = num_heads // self.kv_cache.shape[1]
        block_size = self.kv_cache.shape[2]
        out = torch.zeros(num_tokens, num_heads, size, dtype=torch.float64)
        for t, (request, entries) in enumerate(self.visible):
            if not entries:
                continue
            entry = torch.tensor(sorted(entries))
            block = self.block_table[request].cpu()[entry // block_size].long()
            kv = self.kv_cache.cpu()[block, :, entry % block_size].double()  # [n, nkv, 2D]
            for head in range(num_heads):
                key, value = kv[:, head // group].split(size, dim=-1)
                scores = key @ self.query[t, head].cpu().double() * size**-0.5
                out[t, head] = scores.softmax(0) @ value
        return out


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


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
    seed=0,
) -> Batch:
    """A batch of the given requests, `tail` padding tokens at its end, blocks in random order.

    Whatever no request owns is NaN in the cache, so that reading it cannot go unnoticed.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.Generator().manual_seed(seed)  # trees do not depend on the cache's geometry
    lens = [r.lens() for r in requests]
    blocks = [-(-entries // block_size) for _, entries in lens]
    order = torch.randperm(sum(blocks) + 3, generator=generator)
    shape = [len(order), num_kv_heads, block_size, 2 * head_size]
    order_in_memory = LAYOUTS[layout]
    kv_cache = torch.full([shape[d] for d in order_in_memory], torch.nan, dtype=dtype)
    # Every layout above is its own inverse permutation.
    kv_cache = kv_cache.permute(order_in_memory)
    block_table = torch.zeros(len(requests), max(*blocks, 1) + 2, dtype=torch.int32)
    prefix, words, visible, start = [], [], [], [0]
    taken = 0
    for r, request in enumerate(requests):
        num_queries, num_entries = lens[r]
        own = order[taken : taken + blocks[r]]
        taken += blocks[r]
        block_table[r, : blocks[r]] = own
        for e in range(num_entries):
            kv_cache[own[e // block_size], :, e % block_size] = torch.randn(
                num_kv_heads, 2 * head_size, generator=generator
            ).to(dtype)
        window = getattr(request, "context", 0)
        for prefix_len, bits in request.rows(shapes):
            packed = sum(1 << j for j in bits)
            prefix.append(prefix_len)
            words.append([signed(packed >> 64 * w & (1 << 64) - 1) for w in range(num_words)])
            visible.append((r, set(range(prefix_len)) | {window + j for j in bits}))
        start.append(start[-1] + num_queries)
    total = start[-1] + tail
    query = torch.randn(total, num_kv_heads * group, head_size, generator=generator)
    rows = torch.int32
    return Batch(
        query.to(device, dtype),
        # `to` keeps the strides of a dense tensor.
        kv_cache.to(device),
        block_table.to(device),
        torch.tensor(start, dtype=rows, device=device),
        torch.tensor([entries for _, entries in lens], dtype=rows, device=device),
        torch.tensor(prefix + [0] * tail, dtype=rows, device=device),
        torch.tensor(words + [[0] * num_words] * tail, dtype=torch.int64, device=device),
        torch.tensor([getattr(r, "context", 0) for r in requests], dtype=rows, device=device),
        visible,
    )


def check(got: torch.Tensor, batch: Batch) -> None:
    tolerance = TOLERANCE[batch.query.dtype]
    assert got.dtype == batch.query.dtype
    torch.testing.assert_close(
        got.cpu().double(), batch.oracle(), atol=tolerance, rtol=tolerance, check_dtype=False
    )


MIXED = [Chunk(5, 19), Tree(37, 12), Chunk(20, 1), Tree(3, 9), Chunk(0, 4)]


# The torch reference against the oracle.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", [1, 3])
def test_reference_mixed_batch(layout, group):
    batch = make_batch(MIXED, group=group, layout=layout, tail=3)
    check(tree_attention(*batch.arguments()), batch)


@pytest.mark.parametrize("num_words", [1, 2, 3, 4, 5])
def test_reference_up_to_the_last_bit_of_every_word(num_words):
    nodes = 64 * num_words - 1
    batch = make_batch([Tree(11, nodes), Chunk(9, 1), Tree(2, 5)], num_words=num_words)
    check(tree_attention(*batch.arguments()), batch)


def test_reference_uniform_trees():
    # Trees of one size, side by side, take the way without padding.
    batch = make_batch([Tree(c, 7) for c in (0, 13, 50)], group=2)
    check(tree_attention(*batch.arguments()), batch)


def test_reference_long_chunks_beside_trees():
    long = MAX_BATCHED_QUERY + 9
    batch = make_batch([Tree(6, 5), Chunk(10, long), Tree(30, 8), Chunk(0, long), Chunk(7, 1)])
    check(tree_attention(*batch.arguments()), batch)


def test_reference_queries_that_see_nothing():
    batch = make_batch([Blind(3), Tree(4, 3), Blind(MAX_BATCHED_QUERY + 1)], tail=2)
    batch.kv_cache[0] = 0.0  # a request without entries looks at block 0, with weight 0
    got = tree_attention(*batch.arguments())
    assert (got[:3] == 0).all() and (got[7:] == 0).all()
    check(got, batch)


def test_reference_empty_requests():
    batch = make_batch([Blind(0), Tree(4, 3), Blind(0)])
    check(tree_attention(*batch.arguments()), batch)


def test_a_plan_serves_layers_of_any_geometry():
    """Target and drafter may share a step's plan: the row numbers belong to a cache's layout."""
    one = make_batch(MIXED, layout="heads first")
    two = make_batch(MIXED, layout="entries first", num_kv_heads=3, group=2, head_size=64)
    plan = plan_reference(
        one.block_table, 16, one.query_start.tolist(), one.seq_len.tolist(),
        one.prefix_len, one.words, one.window_start,
    )  # fmt: skip
    for batch in (one, two, one):
        out = torch.empty_like(batch.query)
        check(
            attend_reference(batch.query, batch.kv_cache, plan, batch.query.shape[-1] ** -0.5, out),
            batch,
        )


def test_reference_with_strides_that_are_no_whole_rows():
    batch = make_batch(MIXED)
    blocks, heads, size, width = batch.kv_cache.shape
    packed = torch.full((blocks, heads * size * width + 8), torch.nan)
    view = packed[:, : heads * size * width].unflatten(1, (heads, size, width))
    view.copy_(batch.kv_cache)
    batch.kv_cache = view
    check(tree_attention(*batch.arguments()), batch)


def test_persistent_buffers_may_be_longer_than_the_batch():
    """An engine passes the front of buffers that were made once for the largest batch."""
    batch = make_batch(MIXED)
    wanted = tree_attention(*batch.arguments())
    batch.window_start = torch.cat([batch.window_start, torch.tensor([9, 9])])
    batch.block_table = torch.cat([batch.block_table, batch.block_table[:2]])
    batch.prefix_len = torch.cat([batch.prefix_len, torch.tensor([5, 5])])
    batch.words = torch.cat([batch.words, torch.tensor([[3], [3]])])
    torch.testing.assert_close(tree_attention(*batch.arguments()), wanted, atol=0, rtol=0)


# The kernel against the oracle.


def launch(kernels, batch: Batch) -> torch.Tensor:
    out = torch.full_like(batch.query, torch.nan)
    return kernels.load("tree_attention").tree_attention_triton(*batch.arguments(), out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_kernel_mixed_batch(kernels, group, dtype):
    batch = make_batch(
        MIXED, group=group, num_kv_heads=1, dtype=dtype, device=kernels.device, tail=3
    )
    check(launch(kernels, batch), batch)


@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_kernel_head_sizes(kernels, head_size):
    requests = [Tree(41, 6), Chunk(30, 3)]
    batch = make_batch(requests, head_size=head_size, group=2, block_size=8, device=kernels.device)
    check(launch(kernels, batch), batch)


@pytest.mark.parametrize("num_words", [1, 2, 3, 4, 5])
def test_kernel_up_to_the_last_bit_of_every_word(kernels, num_words):
    batch = make_batch(
        [Chunk(9, 1), Tree(11, 64 * num_words - 1)],
        num_words=num_words, num_kv_heads=1, block_size=32, device=kernels.device,
    )  # fmt: skip
    check(launch(kernels, batch), batch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [5, 16, 80])
def test_kernel_layouts_and_block_sizes(kernels, layout, block_size):
    # 80 = 16 slots of a drafter with K = 5.
    batch = make_batch(
        [Tree(90, 4), Chunk(0, 11)],
        block_size=block_size, layout=layout, device=kernels.device,
    )  # fmt: skip
    check(launch(kernels, batch), batch)


def test_kernel_chunk_of_many_tiles(kernels):
    batch = make_batch(
        [Chunk(70, 50), Chunk(0, 1)], group=3, num_kv_heads=1, device=kernels.device, tail=400
    )
    check(launch(kernels, batch), batch)


def test_kernel_queries_that_see_nothing(kernels):
    batch = make_batch([Blind(3), Tree(4, 3), Blind(0), Blind(2)], device=kernels.device)
    check(launch(kernels, batch), batch)


def test_kernel_strided_query_and_output(kernels):
    batch = make_batch(MIXED, device=kernels.device)
    num_tokens, num_heads, size = batch.query.shape
    fused = torch.randn(num_tokens, 3 * num_heads * size, device=kernels.device)
    query = fused[:, : num_heads * size].unflatten(1, (num_heads, size))
    query.copy_(batch.query)
    batch.query = query
    out = torch.full((num_heads, num_tokens, size), torch.nan, device=kernels.device)
    module = kernels.load("tree_attention")
    check(module.tree_attention_triton(*batch.arguments(), out.transpose(0, 1)), batch)


def test_bounds_cut_what_the_rule_would_show(kernels):
    """Entries from seq_len or max_seq_len on are not visited, whatever prefix and bits say."""
    batch = make_batch([Tree(40, 20), Tree(10, 20)], device=kernels.device)
    batch.seq_len[0], max_seq_len = 45, 27
    batch.visible = [(r, {e for e in seen if e < max_seq_len}) for r, seen in batch.visible]
    arguments = list(batch.arguments())
    arguments[6] = max_seq_len
    module = kernels.load("tree_attention")
    check(module.tree_attention_triton(*arguments, torch.empty_like(batch.query)), batch)
    check(tree_attention(*arguments), batch)


def test_entries_that_nobody_sees_are_not_read(kernels):
    """seq_len is an upper bound: up to it there may be memory that was never written (NaN here)."""
    batch = make_batch([Tree(20, 3), Chunk(17, 2), Tree(5, 2)], device=kernels.device)
    batch.seq_len += torch.tensor([8, 10, 8], dtype=torch.int32, device=kernels.device)
    check(launch(kernels, batch), batch)
    check(tree_attention(*batch.arguments()), batch)
