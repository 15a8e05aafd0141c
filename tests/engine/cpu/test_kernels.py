"""The torch functions that replace kernels on a CPU, against the kernels in the interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import _registry
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.sample import (
    bad_words,
    gumbel,
    logit_bias,
    logprob,
    min_p,
    penalties,
)

from vllm_specblock.cpu.kernels import REPLACED

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="what runs on a CPU only")

VOCAB = 96


@pytest.fixture
def both(monkeypatch):
    """Runs a call with our functions, and again with vLLM's kernels in their places."""

    def run(module, kernels: str, call):
        ours = call()
        for kernel in kernels.split():
            name = f"{module.__name__}.{kernel}"
            assert name in REPLACED
            monkeypatch.setattr(module, kernel, _registry[name][0])
        theirs = call()
        monkeypatch.undo()
        return ours, theirs

    return run


def logits(rows: int = 5) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(rows: int, columns: int, *values: tuple[int, int, list[int]]) -> torch.Tensor:
    """Integers of zero, but for `values`: (row, first column, what stands there)."""
    out = torch.zeros(rows, columns, dtype=torch.int32)
    for row, first, these in values:
        out[row, first : first + len(these)] = ints(*these)
    return out


SLOT = torch.tensor([2, 2, 0, 1, 1])
NODE = ints(0, 1, 0, 0, 1)


def drawn(scores, slots, heat, seeds, position, apply=True) -> torch.Tensor:
    return gumbel.gumbel_sample(
        scores, slots, heat, seeds, position, apply_temperature=apply, is_drafting=False,
        use_fp64=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e5])
def test_sampled_tokens_are_the_kernels(both, dtype, scale):
    """Over a vocabulary of several blocks, flat and steep, nearly all of it masked or none; greedy
    rows take the first of equals; with negative, large and repeated seeds."""
    torch.manual_seed(int(scale))
    scores = scale * torch.randn(9, 5003)
    scores[3].masked_fill_(torch.rand(5003) < 0.99, float("-inf"))
    scores[4].fill_(float("-inf"))
    scores[8, 40:44] = 1e6
    scores, req_idx = scores.to(dtype), torch.tensor([0, 1, 2, 1, 1, 2, 2, 1, 0])
    heat, seeds = torch.tensor([0.0, 0.6, 1.0]), torch.tensor([1, -(1 << 61), (1 << 40) + 3])

    def call():
        tokens = [
            drawn(scores[:, :5001], req_idx, heat, seeds, position, apply)
            for position in (torch.arange(9) * 1001, torch.arange(1 << 20, (1 << 20) + 9))
            for apply in (False, True)
        ]
        return torch.stack(tokens)

    ours, theirs = both(gumbel, "_gumbel_sample_kernel", call)
    assert torch.equal(ours, theirs) and (ours[:, 8] == 40).all() and len(ours.unique()) > 5


@pytest.mark.parametrize("scale", [0.3, 3.0, 20.0])
def test_top_k_and_top_p_keep_what_a_sort_keeps(scale):
    """With ties at the k-th, rows that are masked already, and rows that want neither."""
    draw = torch.Generator().manual_seed(4)
    scores = scale * torch.randn(6, 3001, generator=draw)
    scores[1] = scores[1].round()
    scores[2, 5:] = float("-inf")
    k = torch.tensor([3001, 700, 9, 1, 40, 3001], dtype=torch.int32)
    p = torch.tensor([0.9, 0.97, 0.7, 0.4, 1.0, 1.0])
    for top_k, top_p in ((k, None), (None, p), (k, p)):
        order = scores.sort(dim=1, stable=True)
        kept = order.values.double()
        if top_k is not None:
            kept[kept < kept.gather(1, 3001 - top_k.long()[:, None])] = float("-inf")
        if top_p is not None:
            out = kept.softmax(1).cumsum(1) <= 1 - top_p.double()[:, None]
            out[:, -1] = False
            kept[out] = float("-inf")
        wanted = torch.empty_like(scores).scatter_(1, order.indices, kept.float())
        ours = topk_topp_sampler.apply_top_k_top_p(scores.clone(), top_k, top_p)
        assert torch.equal(ours, wanted)


def penalised():
    counts = torch.randint(0, 3, (3, VOCAB), dtype=torch.int32)
    mask = torch.randint(-(1 << 31), 1 << 31, (3, VOCAB // 32), dtype=torch.int64).int()
    drafted = torch.tensor([3, 9, 5, 7, 9])
    strength = torch.tensor([[1.0, 1.3, 0.8], [0.0, 0.5, 0.0], [0.7, 0.0, 0.0]])
    return penalties, "apply_penalties", drafted, NODE, *strength, mask, counts


def bad():
    history = torch.tensor([[1, 2, 3, 4, 0, 0], [1, 2, 9, 4, 5, 0], [1, 5, 6, 7, 0, 0]]).int()
    words = table(3, 16, (0, 0, [11, 3, 12]), (1, 0, [5, 13, 9, 5, 14]), (2, 0, [7, 20]))
    ends = table(3, 5, (0, 1, [1, 3]), (1, 1, [2, 5]), (2, 1, [2]))
    counts, prompt, total = ints(2, 2, 1), ints(1, 1, 1), ints(4, 5, 4)
    drafted = torch.tensor([7, 9, 4, 5, 13])
    known = words, ends, counts, history, prompt, total, drafted, NODE, 2
    return bad_words, "apply_bad_words", *known


def biased(check: bool = False):
    position = torch.tensor([3, 9, 4, 30, 31])
    allowed = ints(0, 2, 0), table(3, 4, (1, 0, [4, 8]))
    strength = torch.tensor([[0.5, -3.0, 0, 0], [0.0] * 4, [7.0, 0, 0, 0]])
    added = ints(2, 0, 1), table(3, 4, (0, 0, [1, 2]), (2, 0, [90])), strength
    least = ints(10, 99, 4), ints(1, 2, 1), torch.tensor([True, True, False])
    stops = table(3, 4, (0, 0, [5]), (1, 0, [4, 8]), (2, 0, [6]))
    known = position, *allowed, *added, *least, stops, check
    return logit_bias, "apply_logit_bias", *known


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (
            "_temperature_kernel",
            lambda: (gumbel, "apply_temperature", torch.tensor([0.0, 0.5, 1.7])),
        ),
        ("_min_p_kernel", lambda: (min_p, "apply_min_p", torch.tensor([0.0, 0.1, 0.4]))),
        ("_penalties_kernel", penalised),
        ("_bad_words_kernel", bad),
        ("_bias_kernel", biased),
        ("_bias_kernel", lambda: biased(check=True)),
    ],
)
def test_what_changes_logits(both, kernel, given):
    module, name, *known = given()

    def call():
        scores = logits()
        getattr(module, name)(scores, SLOT, *known)
        return scores

    ours, theirs = both(module, kernel, call)
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ours, logits())


def test_logprobs_and_ranks(both):
    tokens = torch.randint(0, VOCAB, (5, 3))
    call = lambda: logprob.compute_token_logprobs(logits(), tokens)  # noqa: E731
    torch.testing.assert_close(*both(logprob, "_topk_log_softmax_kernel", call))
    scores = lambda: logprob.compute_topk_scores(logits(), 2, tokens[:, 0].clone())  # noqa: E731
    ours, theirs = both(logprob, "_ranks_kernel", scores)
    assert torch.equal(ours.selected_token_ranks, theirs.selected_token_ranks)


@pytest.fixture
def batch():
    """Three requests: a prompt's chunk, a decode with two drafts, a decode without."""
    return lambda: SimpleNamespace(
        req_idx=torch.tensor([2, 0, 1]),
        query_start=ints(0, 4, 7, 8),
        computed=ints(9, 6, 3),
        prefill=ints(8, 6, 12),
        first_row=ints(0, 1, 4, 5),
        lengths=ints(7, 12, 7),
        history=torch.arange(3 * 20, dtype=torch.int32).view(3, 20),
    )


def positions(b):
    at, lengths = torch.zeros(8, dtype=torch.int64), torch.full((5,), 77, dtype=torch.int32)
    input_batch.prepare_pos_seq_lens(b.req_idx, b.query_start, b.computed, at, lengths)
    return at, lengths


def prompts(b):
    ids, ahead = torch.zeros(8, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    known = b.req_idx, b.query_start, b.history, b.prefill, b.computed
    input_batch.prepare_prefill_inputs(ids, ahead, *known)
    return ids, ahead


def drafts(b):
    ids, sampled = torch.zeros(8, dtype=torch.int32), torch.tensor([[50], [51], [52]])
    drafted = torch.tensor([[60, 61], [62, 63], [64, 65]])
    known = b.req_idx, sampled, b.query_start, b.lengths, b.prefill, drafted, b.first_row, 5
    return ids, input_batch.combine_sampled_and_draft_tokens(ids, *known)


def verdict(b):
    known = ints(1, 2, 1), b.lengths, b.first_row, b.req_idx, b.prefill
    return input_batch.get_num_sampled_and_rejected(*known)


def update(b):
    last, total = torch.zeros(3, 1, dtype=torch.int64), ints(9, 7, 5)
    counts = torch.zeros(3, VOCAB, dtype=torch.int32)
    sampled = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), ints(0, 3, 1), ints(0, 0, 0)
    state = last, counts, *sampled, b.query_start, b.history, total
    input_batch.post_update(b.req_idx, b.computed, *state)
    return b.computed, last, counts, b.history, total


def expand(b):
    return input_batch.expand_idx_mapping(b.req_idx, 5, b.first_row, 3)


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        ("_prepare_pos_seq_lens_kernel", positions),
        ("_prepare_prefill_inputs_kernel", prompts),
        ("_combine_sampled_and_draft_tokens_kernel", drafts),
        ("_get_num_sampled_and_rejected_kernel", verdict),
        ("_post_update_kernel", update),
        ("_expand_idx_mapping_kernel", expand),
    ],
)
def test_before_and_after_a_step(both, batch, kernel, call):
    ours, theirs = both(input_batch, kernel, lambda: call(batch()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
