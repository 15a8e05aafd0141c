"""One visibility rule for prefill, decode, trees and draft blocks, held to a set-based oracle."""

from __future__ import annotations

import pytest
import torch
from support.attention import (
    LAYOUTS,
    MIXED,
    TOLERANCE,
    Blind,
    Chunk,
    Tree,
    check,
    launch,
    load,
    make_batch,
    reference,
)
from vllm_specblock.triton_kernels.attention.tree_attention_reference import (
    MAX_BATCHED_QUERY,
    attend_reference,
    plan_reference,
)

# The torch reference against the oracle.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", [1, 3])
def test_reference_mixed_batch(layout, group):
    batch = make_batch(MIXED, group=group, layout=layout, tail=3)
    check(reference(batch), batch)


def test_reference_uniform_trees():
    # Trees of one size, side by side, take the way without padding.
    batch = make_batch([Tree(c, 7) for c in (0, 13, 50)], group=2)
    check(reference(batch), batch)


def test_reference_long_chunks_beside_trees():
    long = MAX_BATCHED_QUERY + 9
    batch = make_batch([Tree(6, 5), Chunk(10, long), Tree(30, 8), Chunk(0, long), Chunk(7, 1)])
    check(reference(batch), batch)


def test_reference_queries_that_see_nothing():
    batch = make_batch([Blind(3), Tree(4, 3), Blind(MAX_BATCHED_QUERY + 1)], tail=2)
    batch.kv_cache[0] = 0.0  # a request without entries looks at block 0, with weight 0
    got = reference(batch)
    assert (got[:3] == 0).all() and (got[7:] == 0).all()
    check(got, batch)


def test_a_plan_serves_layers_of_any_geometry():
    """Target and drafter may share a step's plan: the row numbers belong to a cache's layout."""
    one = make_batch(MIXED, layout="heads first")
    two = make_batch(MIXED, layout="entries first", num_kv_heads=3, group=2, head_size=64)
    plan = plan_reference(
        one.block_table,
        16,
        one.query_start.tolist(),
        one.seq_len.tolist(),
        one.prefix_len,
        one.mask_words,
        one.tree_start,
    )
    for batch in (one, two, one):
        out = torch.empty_like(batch.query)
        check(
            attend_reference(batch.query, batch.kv_cache, plan, batch.query.shape[-1] ** -0.5, out),
            batch,
        )


def test_persistent_buffers_may_be_longer_than_the_batch():
    """An engine passes the front of buffers that were made once for the largest batch."""
    batch = make_batch(MIXED)
    wanted = reference(batch)
    batch.tree_start = torch.cat([batch.tree_start, torch.tensor([9, 9])])
    batch.block_table = torch.cat([batch.block_table, batch.block_table[:2]])
    batch.prefix_len = torch.cat([batch.prefix_len, torch.tensor([5, 5])])
    batch.mask_words = torch.cat([batch.mask_words, torch.tensor([[3], [3]])])
    torch.testing.assert_close(reference(batch), wanted, atol=0, rtol=0)


# The kernel against the oracle.


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
def test_up_to_the_last_bit_of_every_word(kernels, num_words):
    requests = [Chunk(9, 1), Tree(11, 64 * num_words - 1), Tree(2, 5)]
    form = {"num_kv_heads": 1, "block_size": 32, "device": kernels.device}
    batch = make_batch(requests, num_words=num_words, **form)
    check(launch(kernels, batch), batch)
    check(reference(batch), batch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [5, 16, 80])
def test_kernel_layouts_and_block_sizes(kernels, layout, block_size):
    # 80 = 16 slots of a drafter with K = 5.
    batch = make_batch(
        [Tree(90, 4), Chunk(0, 11)], block_size=block_size, layout=layout, device=kernels.device
    )
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
    check(load(kernels).tree_attention(*batch.arguments(), out.transpose(0, 1)), batch)


def test_bounds_cut_what_the_rule_would_show(kernels):
    """Entries from seq_len or max_seq_len on are not visited, whatever prefix and bits say."""
    batch = make_batch([Tree(40, 20), Tree(10, 20)], device=kernels.device)
    batch.seq_len[0], max_seq_len = 45, 27
    batch.visible = [(r, {e for e in seen if e < max_seq_len}) for r, seen in batch.visible]
    arguments = list(batch.arguments())
    arguments[6] = max_seq_len
    check(load(kernels).tree_attention(*arguments, torch.empty_like(batch.query)), batch)
    check(reference(batch, max_seq_len), batch)


def test_entries_that_nobody_sees_are_not_read(kernels):
    """seq_len is an upper bound: up to it there may be memory that was never written (NaN here)."""
    batch = make_batch([Tree(20, 3), Chunk(17, 2), Tree(5, 2)], device=kernels.device)
    batch.seq_len += torch.tensor([8, 10, 8], dtype=torch.int32, device=kernels.device)
    check(launch(kernels, batch), batch)
    check(reference(batch), batch)
