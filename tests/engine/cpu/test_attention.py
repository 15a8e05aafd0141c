"""A CPU's cache as vLLM packs it: we store and read it alike, and causal rows get vLLM's bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.attention import Chunk, Tree, check, make_batch

pytest.importorskip("vllm")
if torch.cuda.is_available():
    pytest.skip("of vLLM's CPU build", allow_module_level=True)

from vllm import _custom_ops as ops
from vllm_specblock.triton_kernels.attention.cpu_packing import store_packed
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch

from vllm_specblock.cpu.attention import PackedAttentionImpl, PackedMetadata, packed_cache

DTYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 64, 32


@pytest.mark.parametrize("dtype", DTYPES)
def test_we_pack_as_vllm_does(dtype):
    ours, theirs = (
        torch.zeros(4, BLOCK, KV_HEADS, 2 * SIZE, dtype=dtype).transpose(1, 2) for _ in range(2)
    )
    packed = packed_cache(theirs, "auto")
    if packed is None:
        pytest.skip("vLLM packs the caches of this CPU in another way")
    key, value = torch.randn(2, 40, KV_HEADS, SIZE).to(dtype)
    slots = torch.randperm(4 * BLOCK)[:40]
    slots[7] = -1
    ops.cpu_attn_reshape_and_cache(key, value, packed.keys, packed.values, slots, packed.isa)
    store_packed(ours, packed.packing, slots, key, value)
    assert torch.equal(ours, theirs)


def test_tile_registers_are_requested(monkeypatch):
    """A drafter without weights runs no kernel of ours that would, and vLLM's does not."""
    from vllm.v1.attention.backends import cpu_attn

    from vllm_specblock.cpu import attention

    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "amx")
    packing = SimpleNamespace(head_stride=2 * BLOCK * SIZE)
    monkeypatch.setattr(attention, "packing_on_cpu", lambda *_: packing)
    packed_cache(torch.zeros(2, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16), "auto")
    assert asked


def causal_only(batch, rows: slice, cache) -> torch.Tensor:
    """Rows of one causal request by vLLM's own backend's two calls."""
    packed = packed_cache(cache, "auto")
    request = batch.query_start.tolist().index(rows.start)
    start = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
    length, query = batch.seq_len[request : request + 1], batch.query[rows]
    common = {"query_start_loc": start, "seq_lens": length, "causal": True}
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        dtype=query.dtype,
        sliding_window_size=-1,
        isa=packed.isa,
        enable_kv_split=True,
        **common,
    )
    out = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=packed.keys,
        value_cache=packed.values,
        output=out,
        scale=SIZE**-0.5,
        alibi_slopes=None,
        sliding_window=-1,
        softcap=0.0,
        s_aux=None,
        block_table=batch.block_table[request : request + 1],
        scheduler_metadata=schedule,
        **common,
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_beside_vllms_kernel(dtype):
    """Trees are right, and causal rows between them have the very bits of vLLM's kernel."""
    requests = [Chunk(0, 70), Tree(300, 12), Chunk(200, 1), Tree(37, 30), Tree(90, 0)]
    batch = make_batch(
        requests,
        num_kv_heads=KV_HEADS,
        group=HEADS // KV_HEADS,
        head_size=SIZE,
        block_size=BLOCK,
        dtype=dtype,
        layout="entries first",
        tail=2,
    )
    cache = torch.zeros_like(batch.kv_cache)
    packed = packed_cache(cache, "auto")
    if packed is None:
        pytest.skip("vLLM packs the caches of this CPU in another way")
    start = batch.query_start.tolist()
    entries = batch.kv_cache.nan_to_num().transpose(1, 2).flatten(0, 1)
    store_packed(cache, packed.packing, torch.arange(len(entries)), *entries.chunk(2, dim=-1))
    slots = [
        batch.block_table[r, e // BLOCK] * BLOCK + e % BLOCK
        for r, length in enumerate(batch.seq_len.tolist())
        for e in range(length - (start[r + 1] - start[r]), length)
    ]
    slots = torch.tensor([*slots, -1, -1])
    key, value = entries[slots].chunk(2, dim=-1)
    queries = TreeAttentionBatch(
        batch.block_table,
        batch.query_start,
        start,
        batch.seq_len,
        int(batch.seq_len.max()),
        batch.prefix_len,
        batch.mask_words,
        batch.tree_start,
    )
    impl = PackedAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS)
    out = torch.full_like(batch.query, torch.nan)
    metadata = PackedMetadata(len(out), slots, queries)
    impl.forward(SimpleNamespace(), batch.query, key, value, cache, metadata, out)
    check(out, batch)
    for request in (0, 2, 4):
        rows = slice(start[request], start[request + 1])
        assert torch.equal(out[rows], causal_only(batch, rows, cache))


def test_prompts_have_vllms_bits():
    """In bfloat16 the first token's scores are those of the same runner without us, bit for bit."""
    from support.engines import make_engine
    from support.matrix import PROMPTS, params

    answers = []
    for speculative in (None, {"num_speculative_tokens": 8, "kind": "ngram", "model": None}):
        engine = make_engine(speculative, dtype="bfloat16")
        requests = params(6, max_tokens=1, logprobs=5)
        answers.append([each[0].logprobs for each in engine.generate(PROMPTS[:6], requests)])
    assert answers[0] == answers[1]
