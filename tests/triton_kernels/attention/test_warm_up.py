"""Every kernel that some batch launches has been launched before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_specblock.triton_kernels.attention import attention_schedule as cut
from vllm_specblock.triton_kernels.warm_up import compile_attention, shapes_to_compile


def kernels_of(classes, lengths, group, requests, kv_heads, seq_len):
    launches = cut.plan_launches(classes, lengths, group, requests, kv_heads, seq_len)
    return {(launch.tile, launch.whole, launch.single) for launch in launches}


@settings(max_examples=300, deadline=None)
@given(
    st.data(),
    st.sampled_from([1, 2, 4, 5, 7, 8, 16]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([64, 128, 256]),
    st.integers(1, 256),
)
def test_no_batch_meets_a_new_kernel(data, group, kv_heads, head_size, max_requests):
    longest, max_seq = 8192, 32768
    classes = cut.tile_classes(head_size, torch.bfloat16, cut.HOPPER_SHARED)
    ready = set()
    for query_len, requests, seq_len in shapes_to_compile(
        classes, group, kv_heads, max_requests, longest, max_seq
    ):
        assert query_len <= longest and requests <= max_requests and seq_len <= max_seq
        ready |= kernels_of(classes, {query_len}, group, requests, kv_heads, seq_len)
    requests = data.draw(st.integers(1, max_requests))
    lengths = data.draw(st.sets(st.integers(1, longest), min_size=1, max_size=4))
    seq_len = data.draw(st.integers(1, max_seq))
    assert kernels_of(classes, lengths, group, requests, kv_heads, seq_len) <= ready


@pytest.mark.parametrize("window", [None, 3])
def test_it_runs_and_writes_nothing(window):
    cache = torch.randn(3, 4, 2, 16).transpose(1, 2)  # [blocks, kv heads, block size, 2D]
    before = cache.clone()
    compile_attention(
        torch.empty(1, 4, 8),
        cache,
        torch.zeros(6, 5, dtype=torch.int32),
        2,
        64,
        20,
        window=window,
        soft_cap=4.0,
    )
    assert torch.equal(cache, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for the GPU")
def test_nothing_is_left_to_compile():
    from vllm_specblock.triton_kernels.attention.attention_kernel import _tree_attention_kernel
    from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

    heads, kv_heads, size, block = 8, 2, 64, 16
    cache = torch.randn(64, block, kv_heads, 2 * size, device="cuda").bfloat16().transpose(1, 2)
    table = torch.zeros(32, 64, dtype=torch.int32, device="cuda")
    query = torch.empty(1, heads, size, device="cuda", dtype=torch.bfloat16)
    compile_attention(query, cache, table, 1, 512, 1024)
    ready = sum(len(each[0]) for each in _tree_attention_kernel.device_caches.values())
    for length, requests, entries in ((1, 1, 9), (61, 1, 700), (61, 30, 900), (300, 2, 600)):
        rows = length * requests
        one = torch.ones(rows, dtype=torch.int32, device="cuda")
        start = [length * request for request in range(requests + 1)]
        TreeAttentionBatch(
            table[:requests],
            torch.tensor(start, dtype=torch.int32, device="cuda"),
            start,
            one[:requests],
            entries,
            one,
            torch.zeros(rows, 1, dtype=torch.int64, device="cuda"),
            one[:requests],
        ).attend(query.new_zeros(rows, heads, size), cache, 0.1)
    assert sum(len(each[0]) for each in _tree_attention_kernel.device_caches.values()) == ready
