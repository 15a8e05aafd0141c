"""Every kernel that some batch launches has been launched before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Chunk, Tree, launch, make_batch
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
    query, table = torch.empty(1, 4, 8), torch.zeros(6, 5, dtype=torch.int32)
    compile_attention(query, cache, table, 2, 64, 20, window=window, soft_cap=4.0)
    assert torch.equal(cache, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for the GPU")
def test_nothing_is_left_to_compile(kernels):
    if kernels.interpreted:
        pytest.skip("nothing is compiled")
    from vllm_specblock.triton_kernels.attention.attention_kernel import _tree_attention_kernel

    dtype = torch.bfloat16
    cache = torch.randn(64, 16, 2, 2 * 64, device="cuda", dtype=dtype).transpose(1, 2)
    table = torch.zeros(32, 64, dtype=torch.int32, device="cuda")
    query = torch.empty(1, 8, 64, device="cuda", dtype=dtype)
    compile_attention(query, cache, table, 1, 512, 1024)
    ready = sum(len(each[0]) for each in _tree_attention_kernel.device_caches.values())
    for requests in ([Chunk(8, 1)], [Tree(640, 60)], [Tree(840, 60)] * 30, [Chunk(300, 300)] * 2):
        launch(kernels, make_batch(requests, group=4, head_size=64, dtype=dtype, device="cuda"))
    assert sum(len(each[0]) for each in _tree_attention_kernel.device_caches.values()) == ready
