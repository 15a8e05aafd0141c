"""One launch says what torch says of new trees."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.feedback.write_survival_numba import node_steps_numba

from vllm_specblock.feedback.acceptance_estimator import (
    BINS_PER_NAT,
    PRIOR,
    AcceptanceEstimator,
    kinds,
)

from ..tree.test_store_tree import in_a_table, random_trees


def seen_much(device: torch.device | str, seed: int, most: float = 50.0) -> AcceptanceEstimator:
    """Counts of some 600 steps, which neither fall with the score nor are alike by kind."""
    draw = torch.Generator().manual_seed(seed)
    table = AcceptanceEstimator("cpu")
    table.judged.copy_(most * torch.rand(table.judged.shape, generator=draw) ** 3)
    table.reached.copy_(table.judged * torch.rand(table.judged.shape, generator=draw))
    made = AcceptanceEstimator(device)
    made.judged.copy_(table.judged), made.reached.copy_(table.reached)
    return made


def launch(kernels, req_idx, score, temperature, table, steps):
    seen = table.judged, table.reached, table.believed, PRIOR, BINS_PER_NAT
    kernels.load("write_survival").write_survival_triton(req_idx, score, temperature, *seen, steps)


def offered(kernels, score: torch.Tensor, heat: torch.Tensor, seed: int):
    """`steps` by the kernel, and by torch; `score` and `heat` are of requests."""
    count, num_nodes = score.shape
    req_idx = torch.randperm(count + 4, generator=torch.Generator().manual_seed(seed))[:count]
    by_slot = torch.full((count + 4, num_nodes), float("nan"))
    by_slot[req_idx] = score
    wanted = torch.zeros(count, num_nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optional_numba, "AVAILABLE", False)
        seen_much("cpu", seed).write_survival(by_slot, heat, req_idx, wanted)

    on = kernels.device
    steps = torch.full((count + 2, num_nodes), -7.0, device=on)
    slots, heat = in_a_table(req_idx.to(on)), in_a_table(heat.to(on))
    launch(kernels, slots, by_slot.to(on), heat, seen_much(on, seed), steps)
    assert (steps[count:] == -7).all()
    return steps[:count].cpu(), wanted


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"),
    [(0, 70), (1, 12), (5, 1), (4, 60), (3, 63), (3, 64), (2, 256)],
)
def test_as_torch(kernels, num_requests, num_nodes):
    # The order of trees as they are served: the best first.
    score = random_trees(num_requests, num_nodes).logprob.sort(1, descending=True).values
    heat = torch.tensor([0.0, 0.7, 1.3]).repeat(num_requests)[:num_requests]
    steps, wanted = offered(kernels, score, heat, seed=num_nodes)
    torch.testing.assert_close(steps, wanted, atol=1e-6, rtol=3e-5)
    if num_requests > 2:
        assert (steps[1] == 0).all() and (steps[0] > 0).all(), "an empty tree and a full one"


@pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")
@pytest.mark.parametrize(
    ("num_requests", "num_nodes"), [(0, 12), (1, 1), (9, 7), (4, 60), (2, 256)]
)
@pytest.mark.parametrize("most", [0.0, 50.0, 3e6])
def test_the_loop_for_cpus(num_requests, num_nodes, most):
    score = random_trees(num_requests, num_nodes).logprob.sort(1, descending=True).values
    if num_nodes == 7:
        score[0] = torch.tensor([0.3, 0.0, -0.125, -0.25, -7.9, -8.0, -300.0])
    heat = torch.tensor([0.0, 0.7, 1.3]).repeat(num_requests)[:num_requests]
    table = seen_much("cpu", 5, most)
    steps = torch.full((num_requests + 2, num_nodes), -7.0)
    pytest.importorskip("numba")
    node_steps_numba(
        heat, table.judged, table.reached, table.believed, PRIOR, BINS_PER_NAT, score, steps
    )
    for name in ("judged", "reached", "believed"):
        setattr(table, name, getattr(table, name).double())
    wanted = table.steps(kinds(heat), score.double()).float()
    torch.testing.assert_close(steps[:num_requests], wanted, atol=1e-6, rtol=3e-5)
    assert (steps[num_requests:] == -7).all()


def test_scores_at_the_ends(kernels):
    """Scores above nothing and below all bins, the middles and the edges of bins."""
    score = torch.tensor([[0.3, 0.0, -0.125, -0.25, -0.26, -0.375, -7.9, -8.0, -300.0]])
    for seed, heat in enumerate([0.0, 1.0, 0.0, 1.0]):
        steps, wanted = offered(kernels, score, torch.tensor([heat]), seed)
        torch.testing.assert_close(steps, wanted, atol=1e-6, rtol=3e-5)
        assert wanted.min() < 0.9 and wanted.max() == 1, "the counts say too little"


def test_after_a_long_time(kernels):
    """Counts of a large batch for hours: held against the reference in double precision."""
    table, exact = seen_much(kernels.device, 3, most=3e6), seen_much("cpu", 3, most=3e6)
    for name in ("judged", "reached", "believed"):
        setattr(exact, name, getattr(exact, name).double())
    score = random_trees(2, 60).logprob.sort(1, descending=True).values
    steps, heat = torch.zeros(2, 60, device=kernels.device), torch.tensor([0.0, 0.5])
    slots = torch.tensor([0, 1], device=kernels.device)
    launch(kernels, slots, score.to(kernels.device), heat.to(kernels.device), table, steps)
    wanted = exact.steps(kinds(heat), score.double()).float()
    torch.testing.assert_close(steps.cpu(), wanted, atol=1e-6, rtol=3e-5)
