"""One launch, or one loop, says what torch says of new trees in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tensors import column

from vllm_specblock.feedback.acceptance_estimator import (
    BINS_PER_NAT,
    PRIOR,
    AcceptanceEstimator,
    kinds,
    mark,
    marked,
)

from ..random_trees import random_trees

TABLES = ("judged", "reached", "believed")


def assert_as_torch(forms, score: torch.Tensor, heat: torch.Tensor, most: float = 50.0):
    """Hold a form to torch after some 600 steps -> its `steps`.

    Counts neither fall with the score nor are alike by kind; `most` is of a bin.
    """
    draw = torch.Generator().manual_seed(score.shape[1])
    exact = AcceptanceEstimator("cpu")
    exact.judged.copy_(most * torch.rand(exact.judged.shape, generator=draw) ** 3)
    exact.reached.copy_(exact.judged * torch.rand(exact.judged.shape, generator=draw))
    seen = (*(getattr(exact, name).to(forms.device) for name in TABLES), PRIOR, BINS_PER_NAT)
    count, num_nodes = score.shape
    steps = torch.full((count + 2, num_nodes), -7.0, device=forms.device)
    module = forms.load("write_survival")
    if hasattr(module, "node_steps_triton"):
        module.node_steps_triton(heat, *seen, score, steps)
    else:
        slots = torch.randperm(count + 4, generator=draw)[:count]
        by_slot = torch.full((count + 4, num_nodes), float("nan"))
        by_slot[slots] = score
        by_slot, *rows = (x.to(forms.device) for x in (by_slot, slots, heat))
        slots, heat_there = map(column, rows)
        module.write_survival_triton(slots, by_slot, heat_there, *seen, steps)
        assert_marks(forms, module, draw, (slots, by_slot, heat_there, *seen), steps[:count])
    for name in TABLES:
        setattr(exact, name, getattr(exact, name).double())
    wanted = exact.steps(kinds(heat), score.double()).float()
    torch.testing.assert_close(steps[:count].cpu(), wanted, atol=1e-6, rtol=3e-5)
    assert (steps[count:] == -7).all()
    return wanted


def assert_marks(forms, module, draw, given, plain):
    """Hold the marks of later blocks' nodes to the reference."""
    slots, by_slot, *_ = given
    size, num_nodes = by_slot.shape
    depth = torch.randint(0, 9, (size, num_nodes + 1), generator=draw).to(forms.device)
    origin = torch.randint(0, 4, (size, num_nodes), generator=draw).byte().to(forms.device)
    steps = torch.empty_like(plain)
    module.write_survival_triton(*given, steps, module.Later(depth, origin, 4, 2))
    later = (depth[slots.long(), 1:] > 4) & (origin[slots.long()] < 2)
    wanted = plain.clone()
    mark(wanted, later)
    assert torch.equal(steps, wanted)
    found = marked(steps.cpu().numpy())
    assert np.array_equal(found, (later & (plain > 0)).cpu().numpy())


def test_a_marked_1_is_less():
    steps = torch.tensor([[1.0, 1.0, 0.0, 0.25]])
    mark(steps, torch.tensor([[True, False, True, True]]))
    assert marked(steps.numpy()).tolist() == [[True, False, False, True]]
    assert steps[0, 0] < 1 and steps[0, 1:3].tolist() == [1, 0]
    torch.testing.assert_close(steps, torch.tensor([[1.0, 1.0, 0.0, 0.25]]))


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"),
    [(0, 70), (1, 1), (1, 12), (5, 1), (4, 60), (3, 63), (3, 64), (2, 256)],
)
# Nothing yet; some steps; a large batch for hours.
@pytest.mark.parametrize("most", [0.0, 50.0, 3e6])
def test_as_torch(forms, num_requests, num_nodes, most):
    score = random_trees(num_requests, num_nodes, fall=12 / (num_nodes + 8)).logprob
    heat = torch.tensor([0.0, 0.7, 1.3]).repeat(2)[:num_requests]
    steps = assert_as_torch(forms, score, heat, most)
    if num_requests > 2:
        assert (steps[1] == 0).all() and (steps[0] > 0).all(), "an empty tree and a full one"


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_scores_at_the_ends(forms, heat):
    """Scores above nothing and below all bins, the middles and the edges of bins."""
    score = torch.tensor([[0.3, 0.0, -0.125, -0.25, -0.26, -0.375, -7.9, -8.0, -300.0]])
    steps = assert_as_torch(forms, score, torch.tensor([heat]))
    assert steps.min() < 0.9 and steps.max() == 1, "the counts say too little"
