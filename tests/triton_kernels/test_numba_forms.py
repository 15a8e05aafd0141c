"""Compiled loops against torch where `benchmarks/fuzz_kernels.py` has no random cases."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows, KVCacheSet
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import lm_and_rank_head
from vllm_specblock.triton_kernels.layers.lm_and_rank_head_numba import lm_and_rank_head_numba

from vllm_specblock.commit.move import move_path
from vllm_specblock.cpu import loops

pytestmark = pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")


@pytest.fixture
def same(monkeypatch):
    """Holds what a call returns against what it returns in torch."""
    loops.register()

    def check(call):
        compiled = call()
        with monkeypatch.context() as patch:
            patch.setattr(optional_numba, "AVAILABLE", False)
            for one, other in zip(compiled, call(), strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)
        return compiled

    return check


@pytest.mark.parametrize("layout", ["heads first", "entries first", "packed", "packed for amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_path_moves_in_every_layer(same, dtype, layout):
    draw = torch.Generator().manual_seed(1)
    packed = layout.startswith("packed")
    if packed and dtype != torch.bfloat16:
        pytest.skip("every dtype is packed alike")
    shape = (3, 3, 2, 32, 64) if packed else (3, 9, 2, 4, 10)
    if layout == "entries first":
        shape = (3, 9, 4, 2, 10)
    memory = torch.randint(0, 255, shape, generator=draw).to(dtype)
    path = torch.tensor([[0, 2, 3, 7], [0, 1, 4, 9], [0, 5, 6, 7], [0, 0, 0, 0]])
    accepted = torch.tensor([3, 2, 1, 0], dtype=torch.int32)
    rows = AcceptedRows(torch.tensor([0, 8, 18, 26]), torch.tensor([1, 3, 1, 2]), path, accepted)
    slot = torch.randperm(36, generator=draw)[:30]
    slot[2] = -1  # read by the first request

    def call():
        layers, packing = memory.clone(), None
        caches = layers.transpose(2, 3) if layout == "entries first" else layers
        if packed:
            module = pytest.importorskip("vllm_specblock.triton_kernels.attention.cpu_packing")
            packing = module.packing_of(layers[0], layout.endswith("amx"))
            assert packing is not None
        move_path(KVCacheSet(list(caches), packing), slot, rows, 29)
        return (layers,)

    assert not torch.equal(same(call)[0], memory)


@pytest.mark.parametrize(
    ("vocab", "width", "scope"), [(2050, 16, None), (300, 4, 50), (10, 10, 10)]
)
@pytest.mark.parametrize("beta", [None, torch.tensor([0.7, 2.3])])
def test_read_heads(vocab, width, scope, beta):
    """Up to the last digits: log-probabilities and, through the rank head, all of the features."""
    draw = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(2, 3, 4, vocab, generator=draw)
    normed = torch.randn(2, 3, 4, 8, generator=draw)
    offset = torch.randint(0, 9, (vocab,), generator=draw)
    last = torch.nn.Linear(23, 4, bias=False)
    torch.nn.init.normal_(last.weight, generator=draw)
    with torch.no_grad():
        given = normed, logits, offset, torch.nn.Sequential(last), width, scope, beta
        (logprob, token, bucket), wanted = (
            lm_and_rank_head_numba(*given),
            lm_and_rank_head.reference(*given),
        )
    torch.testing.assert_close(logprob, wanted[0], atol=3e-5, rtol=0)
    assert torch.equal(token, wanted[1]) and torch.equal(bucket, wanted[2])
