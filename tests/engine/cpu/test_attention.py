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
from vllm.v1.attention.backends import cpu_attn
from vllm_specblock.triton_kernels.attention.cpu_packing import store_packed

from vllm_specblock.cpu.attention import PackedAttentionImpl, PackedMetadata, packed_cache

DTYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 64, 32


def test_tile_registers_are_requested(monkeypatch):
    """A drafter without weights runs no kernel of ours that would, and vLLM's does not."""
    from vllm_specblock.cpu import attention

    asked = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "amx")
    packing = SimpleNamespace(head_stride=2 * BLOCK * SIZE)
    monkeypatch.setattr(attention, "packing_on_cpu", lambda *_: packing)
    packed_cache(torch.zeros(2, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16), "auto")
    assert asked


def plain_metadata(batch, isa: str, causal: list[bool]) -> cpu_attn.CPUAttentionMetadata:
    """vLLM's own metadata of a batch in which the other requests are of no length."""
    lengths, start = batch.seq_len * torch.tensor(causal), batch.query_start
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        dtype=batch.query.dtype,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
        query_start_loc=start,
        seq_lens=lengths,
        causal=True,
    )
    rows = int(start[-1])
    return cpu_attn.CPUAttentionMetadata(
        rows, rows, start, int(lengths.max()), lengths, batch.block_table, None, schedule
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_beside_vllms_kernel(dtype, monkeypatch):
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
    queries = batch.queries()
    impl = PackedAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)
    impl.plain = impl.as_in(cpu_attn.CPUAttentionBackendImpl)
    layer = SimpleNamespace(isa=packed.isa, _k_scale_float=1.0, _v_scale_float=1.0)
    causal = queries.causal().tolist()
    assert causal == [True, False, True, False, True]
    out = torch.full_like(batch.query, torch.nan)
    plain = plain_metadata(batch, packed.isa, causal)
    metadata = PackedMetadata(len(out), slots, queries, plain=plain)
    impl.forward(layer, batch.query, key, value, cache, metadata, out)
    check(out, batch)
    wanted = torch.empty_like(out)
    for request in (0, 2, 4):
        alone = plain_metadata(batch, packed.isa, [other == request for other in range(5)])
        impl.plain.forward(layer, batch.query, None, None, packed.whole, alone, wanted)
        rows = slice(start[request], start[request + 1])
        assert torch.equal(out[rows], wanted[rows])
