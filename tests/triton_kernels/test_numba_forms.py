"""Compiled loops against torch where `benchmarks/fuzz_kernels.py` has no random cases."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.layers.lm_and_rank_head import lm_and_rank_head
from vllm_specblock.triton_kernels.layers.lm_and_rank_head_numba import lm_and_rank_head_numba

pytestmark = pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")


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
