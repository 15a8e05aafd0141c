"""One launch hands a batch's drafts out as torch does, ties included."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column
from vllm_specblock.triton_kernels.verify.reallocate_drafts import DraftStarts

from vllm_specblock.engine.draft_allocation import reallocate_drafts

GARBAGE = -7


def some_batch(num_requests: int, num_nodes: int, even: bool):
    """(confidence, slot, counts): requests with all drafts, with none, and some in between.

    even: confidences are of so few values that most survivals are those of others, too.
    """
    draw = torch.Generator().manual_seed(num_requests * num_nodes + even)
    confidence = torch.rand(num_requests + 3, num_nodes, generator=draw) ** (4 / num_nodes)
    if even:
        confidence = (4 * confidence).round() / 4
    counts = torch.randint(0, num_nodes + 1, (2, num_requests), generator=draw).int()
    counts[0, :3] = torch.tensor([num_nodes, 0, num_nodes])[:num_requests]
    counts[1] += 1
    return confidence, torch.randperm(num_requests + 3, generator=draw)[:num_requests], counts


def handed_out(reallocate, confidence, req_idx, counts, budget: int):
    """(logit_start, row_start), which are longer than the batch."""
    count = len(req_idx)
    starts = [
        torch.full((count + extra,), GARBAGE, dtype=torch.int32, device=req_idx.device)
        for extra in (3, 70)
    ]
    reallocate(DraftStarts(confidence, counts, *starts), req_idx, budget)
    return [x.cpu() for x in starts]


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"), [(1, 1), (3, 7), (33, 64), (65, 63), (130, 120)]
)
@pytest.mark.parametrize("even", [False, True], ids=["continuous", "ties"])
def test_as_torch(kernels, num_requests, num_nodes, even):
    confidence, req_idx, counts = some_batch(num_requests, num_nodes, even)
    total, on = int(counts[0].sum()), kernels.device
    launch = kernels.load("reallocate_drafts").reallocate_drafts_triton
    own = column(req_idx.to(on)) if even else req_idx.int().to(on)
    for budget in sorted({0, 1, total // 3, total // 2, total - 1, total}):
        wanted = handed_out(reallocate_drafts.reference, confidence, req_idx, counts, budget)
        found = handed_out(launch, confidence.to(on), own, counts.to(on), budget)
        assert_equal(found, wanted)
        logits, rows = found
        assert logits[num_requests] == num_requests + budget
        assert (logits[num_requests + 1 :] == GARBAGE).all()
        assert (rows[num_requests:] == counts[1].sum() + budget).all()


def admitted(kernels, confidence: list[list[float]], drafts: list[int], budget: int) -> list[int]:
    """Drafts of each request that a launch admits, as torch does."""
    launch = kernels.load("reallocate_drafts").reallocate_drafts_triton
    counts = torch.tensor([drafts, [1] * len(drafts)], dtype=torch.int32)
    given = torch.tensor(confidence), torch.arange(len(drafts)), counts
    found = handed_out(launch, *(x.to(kernels.device) for x in given), budget)
    assert_equal(found, handed_out(reallocate_drafts.reference, *given, budget))
    return (found[0][: len(drafts) + 1].diff() - 1).tolist()


def test_of_equals_the_earlier_requests_and_nodes_are_first(kernels):
    same = [[1.0, 0.5, 1.0, 1.0]] * 3
    wanted = {2: [1, 1, 0], 3: [1, 1, 1], 5: [3, 1, 1], 8: [4, 3, 1], 11: [4, 4, 3]}
    for budget, kept in wanted.items():
        assert admitted(kernels, same, [4, 4, 4], budget) == kept
    # Drafts that are not there have no turn.
    assert admitted(kernels, same, [2, 0, 4], 3) == [2, 0, 1]
    # Ties between more requests than are looked at together.
    assert admitted(kernels, [[1.0]] * 200, [1] * 200, 130) == [1] * 130 + [0] * 70


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 3.0])
def test_the_budget_is_kept_at_any_confidence(kernels, value):
    """What follows is laid out for so many rows: any other number would be read past its end."""
    confidence, _, _ = some_batch(5, 60, even=False)
    confidence[1:3, 7] = confidence[4, 0] = value
    for budget in (0, 1, 50, 150, 299, 300):
        kept = admitted(kernels, confidence[:5].tolist(), [60] * 5, budget)
        assert sum(kept) == budget and min(kept) >= 0 and max(kept) <= 60
