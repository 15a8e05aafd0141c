"""The target's attention layer: its calls of the kernel and of FlashAttention."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.attention import Chunk, make_batch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_specblock.engine import attention
from vllm_specblock.engine.attention import TreeAttentionImpl, TreeAttentionMetadata
from vllm_specblock.options import OptionError

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 32, 40


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_layer_attends_as_its_options_say(window, soft_cap, cache_dtype):
    """A prompt's keys and values are stored, 8 bits by scales of their own, and attended to."""
    batch = make_batch([Chunk(0, TOKENS)], group=2, layout="entries first")
    key, value = torch.randn(2, TOKENS, KV_HEADS, SIZE)
    value[5] = 1e5  # beyond the range of fp8
    scales = {"key_scale": 0.5, "value_scale": 4.0} if cache_dtype == "fp8" else {}
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(4.0))
    options = {"sliding_window": window, "logits_soft_cap": soft_cap}
    impl = TreeAttentionImpl(HEADS, SIZE, 0.25, KV_HEADS, kv_cache_dtype=cache_dtype, **options)
    entry = torch.arange(TOKENS)
    slot = batch.block_table[0, entry // 16] * 16 + entry % 16
    kept = torch.zeros_like(batch.kv_cache, dtype=torch.uint8 if scales else torch.float32)
    metadata = TreeAttentionMetadata(TOKENS, slot, batch.queries())
    out = torch.empty_like(batch.query)
    impl.forward(layer, batch.query, key, value, kept, metadata, out)

    stored = torch.cat([key / scales.get("key_scale", 1), value / scales.get("value_scale", 1)], -1)
    if scales:
        kept, stored = kept.view(torch.float8_e4m3fn), stored.clamp(-448, 448)
    stored = stored.to(kept.dtype)
    assert torch.equal(kept[slot // 16, :, slot % 16].float(), stored.float())
    batch.kv_cache = kept
    batch.query *= 0.25 * SIZE**0.5  # the oracle's scale is another one
    wanted = batch.oracle(window=window, soft_cap=soft_cap or 0.0, **scales)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)


def stand_in_flash(query, key, value, *, window_size=(-1, -1), out=None, **given):
    """What FlashAttention's interface promises, for a paged cache; in e4m3 version 3."""
    a = SimpleNamespace(**given)
    assert a.causal and key.stride(-1) == value.stride(-1) == 1
    out = torch.full_like(query, torch.nan) if out is None else out
    one = torch.ones(len(a.seqused_k), key.shape[2])
    q_scale, k_scale, v_scale = (given.get(f"{name}_descale", one) for name in "qkv")
    assert q_scale.shape == k_scale.shape == v_scale.shape == one.shape
    group = query.shape[1] // key.shape[2]
    for r, length in enumerate(a.seqused_k.tolist()):
        rows = slice(int(a.cu_seqlens_q[r]), int(a.cu_seqlens_q[r + 1]))
        assert rows.stop - rows.start <= a.max_seqlen_q and length <= a.max_seqlen_k
        if length == 0:
            continue
        k, v = (
            x.float()[a.block_table[r].long()].flatten(0, 1)[:length].repeat_interleave(group, 1)
            for x in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), k) * a.softmax_scale
        scores *= q_scale[r, 0] * k_scale[r, 0]
        if a.softcap:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        age = torch.arange(length - len(query[rows]), length)[:, None] - torch.arange(length)
        scores[:, (age < 0) | (age > window_size[0] if window_size[0] >= 0 else False)] = -torch.inf
        weights = scores.softmax(-1)
        if query.itemsize == 1:
            unit = weights.amax(-1, keepdim=True) / 256
            weights = (weights / unit).to(query.dtype).float() * unit
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v * v_scale[r, 0])
    return out


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_requests_without_trees_by_flash_attention(window, soft_cap, cache_dtype, monkeypatch):
    """The rows before theirs stay as they are."""
    flash = partial(stand_in_flash, fa_version=3)
    monkeypatch.setattr(attention, "flash_attention", lambda head_size: flash)
    monkeypatch.setattr(attention, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    dtype = torch.float8_e4m3fn if cache_dtype == "fp8" else torch.float32
    requests = [Chunk(9, 3), Chunk(37, 12), Chunk(0, 5), Chunk(20, 1)]
    batch = make_batch(requests, group=2, dtype=dtype)
    metadata = CommonAttentionMetadata(
        num_reqs=4,
        num_actual_tokens=21,
        max_query_len=12,
        max_seq_len=60,
        slot_mapping=torch.arange(21),
        query_start_loc=batch.query_start,
        query_start_loc_cpu=batch.query_start,
        seq_lens=batch.seq_len,
        seq_lens_cpu_upper_bound=batch.seq_len + 2,
        block_table_tensor=batch.block_table,
        is_prefilling=torch.tensor([False, False, True, True]),
    )
    out = batch.empty().fill_(7)
    rest = attention.after_trees(metadata, 1)
    assert (rest.num_actual_tokens, rest.max_query_len, rest.max_seq_len) == (18, 12, 51)
    assert rest.is_prefilling.tolist() == [False, True, True]
    options = {"sliding_window": window, "logits_soft_cap": soft_cap}
    impl = TreeAttentionImpl(HEADS, SIZE, 32**-0.5, KV_HEADS, kv_cache_dtype=cache_dtype, **options)
    assert impl.supports_quant_query_input == (cache_dtype == "fp8")
    half, three = torch.tensor(0.5), torch.tensor(3.0)
    layer = SimpleNamespace(_q_scale=half, _k_scale=three, _v_scale=half)
    told = TreeAttentionMetadata(21, None, None, rest)
    impl.attend(layer, batch.query, None, None, batch.kv_cache, None, told, out)
    assert (out[:3] == 7).all()
    scales = {"key_scale": 1.5, "value_scale": 0.5} if cache_dtype == "fp8" else {}
    wanted = batch.oracle(window=window, soft_cap=soft_cap, **scales)
    torch.testing.assert_close(out[3:].double(), wanted[3:], atol=2e-5, rtol=2e-5)
    assert attention.after_trees(metadata, 4) is None


def test_flash_attention_takes_what_it_knows(monkeypatch):
    def spec(dtype=torch.bfloat16, head_size=64):
        return SimpleNamespace(dtype=dtype, head_size=head_size)

    def of_version(version):
        return lambda head_size: partial(stand_in_flash, fa_version=version)

    cuda = torch.device("cuda")
    monkeypatch.setattr(attention, "flash_attention", of_version(3))
    assert attention.flash_takes(spec(), cuda)
    assert not attention.flash_takes(spec(), torch.device("cpu"))
    assert attention.flash_takes(spec(torch.uint8), cuda), "a cache of 8 bits"
    assert not attention.flash_takes(spec(torch.float32), cuda)
    assert not attention.flash_takes(spec(head_size=20), cuda)
    assert not attention.flash_takes(spec(head_size=512), cuda), "FlashAttention 4 alone takes it"
    monkeypatch.setattr(attention, "flash_attention", of_version(None))
    assert not attention.flash_takes(spec(), cuda), "a GPU that it has no kernel for"
    monkeypatch.setattr(attention, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    with pytest.raises(OptionError, match=r"Head size 512 has no fp8 KV cache"):
        TreeAttentionImpl(1, 512, 0.25, 1, kv_cache_dtype="fp8")
