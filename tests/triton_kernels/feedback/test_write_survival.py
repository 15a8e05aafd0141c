"""One launch says what torch says of new trees, and leaves none to those that sleep."""

from __future__ import annotations

import pytest
import torch
from vllm_specblock.triton_kernels import optional_numba
from vllm_specblock.triton_kernels.feedback.write_survival_numba import node_steps_numba

from vllm_specblock.combine.combined import Combined
from vllm_specblock.feedback.acceptance_estimator import (
    BINS_PER_NAT,
    PRIOR,
    AcceptanceEstimator,
    kinds,
)
from vllm_specblock.tree import DraftTree

from ..tree.test_best_chain import NAMES, fields_of, in_a_table, random_trees


def seen_much(device: torch.device | str, seed: int, most: float = 50.0) -> AcceptanceEstimator:
    """Counts of some 600 steps, which neither fall with the score nor are alike by kind."""
    draw = torch.Generator().manual_seed(seed)
    table = AcceptanceEstimator("cpu")
    table.judged.copy_(most * torch.rand(table.judged.shape, generator=draw) ** 3)
    table.reached.copy_(table.judged * torch.rand(table.judged.shape, generator=draw))
    made = AcceptanceEstimator(device)
    made.judged.copy_(table.judged), made.reached.copy_(table.reached)
    return made


def launch(kernels, req_idx, paused, temperature, table, steps, given):
    return kernels.load("write_survival").write_survival_triton(
        req_idx,
        paused,
        temperature,
        table.judged,
        table.reached,
        table.believed,
        PRIOR,
        BINS_PER_NAT,
        steps,
        **given,
    )


def offered(kernels, combined: Combined, paused: torch.Tensor, heat: torch.Tensor, seed: int):
    """(steps, fields) by the kernel, and by torch; `paused` and `heat` are of requests."""
    count, num_nodes = combined.origin.shape
    req_idx = torch.randperm(count + 4, generator=torch.Generator().manual_seed(seed))[:count]
    by_slot = torch.ones(count + 4, dtype=torch.bool)
    by_slot[req_idx] = paused
    wanted = torch.zeros(count, num_nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optional_numba, "AVAILABLE", False)
        theirs = seen_much("cpu", seed).write_survival(combined, heat, req_idx, by_slot, wanted)

    on = kernels.device
    given = {name: in_a_table(x.to(on)) for name, x in fields_of(combined).items()}
    before = {name: x.clone() for name, x in given.items()}
    steps = torch.full((count + 2, num_nodes), -7.0, device=on)
    made = launch(
        kernels,
        in_a_table(req_idx.to(on)),
        by_slot.to(on),
        in_a_table(heat.to(on)),
        seen_much(on, seed),
        steps,
        given,
    )
    for name, x in given.items():
        assert torch.equal(x, before[name]), "the trees given stay as they are"
    assert (steps[count:] == -7).all()
    return steps[:count].cpu(), dict(zip(NAMES, made, strict=True)), wanted, fields_of(theirs)


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"),
    [(1, 12), (5, 1), (9, 7), (4, 60), (3, 63), (3, 64), (3, 127), (3, 128), (2, 256)],
)
def test_as_torch(kernels, num_requests, num_nodes):
    combined = random_trees(num_requests, num_nodes)
    # The order of trees as they are served: the best first.
    order = combined.tree.logprob.sort(1, descending=True).values
    combined.tree.logprob.copy_(order)
    heat = torch.tensor([0.0, 0.7, 1.3]).repeat(num_requests)[:num_requests]
    for paused in (torch.zeros(num_requests).bool(), torch.arange(num_requests) % 3 == 2):
        steps, made, wanted, theirs = offered(kernels, combined, paused, heat, seed=num_nodes)
        torch.testing.assert_close(steps, wanted, atol=1e-6, rtol=3e-5)
        for name, values in theirs.items():
            assert made[name].dtype == values.dtype and made[name].is_contiguous(), name
            assert torch.equal(made[name].cpu(), values), name
    if num_requests > 2:
        assert paused.any() and (steps[2] == 0).all() and (steps[0] > 0).all()


@pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")
@pytest.mark.parametrize(
    ("num_requests", "num_nodes"), [(0, 12), (1, 1), (9, 7), (4, 60), (2, 256)]
)
@pytest.mark.parametrize("most", [0.0, 50.0, 3e6])
def test_the_loop_for_cpus(num_requests, num_nodes, most):
    score = random_trees(num_requests, num_nodes).tree.logprob.sort(1, descending=True).values
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
    shape = score.shape
    chain = DraftTree.chain(torch.ones(shape).long(), score, torch.tensor([9], dtype=torch.int32))
    for seed, heat in enumerate([0.0, 1.0, 0.0, 1.0]):
        steps, _, wanted, _ = offered(
            kernels, Combined.of(chain, 1), torch.tensor([False]), torch.tensor([heat]), seed
        )
        torch.testing.assert_close(steps, wanted, atol=1e-6, rtol=3e-5)
        assert wanted.min() < 0.9 and wanted.max() == 1, "the counts say too little"


def test_after_a_long_time(kernels):
    """Counts of a large batch for hours: held against the reference in double precision."""
    table, exact = seen_much(kernels.device, 3, most=3e6), seen_much("cpu", 3, most=3e6)
    for name in ("judged", "reached", "believed"):
        setattr(exact, name, getattr(exact, name).double())
    combined = random_trees(2, 60)
    combined.tree.logprob.copy_(combined.tree.logprob.sort(1, descending=True).values)
    given = {name: x.to(kernels.device) for name, x in fields_of(combined).items()}
    steps, heat = torch.zeros(2, 60, device=kernels.device), torch.tensor([0.0, 0.5])
    launch(
        kernels,
        torch.tensor([1, 0], device=kernels.device),
        torch.zeros(2, dtype=torch.bool, device=kernels.device),
        heat.to(kernels.device),
        table,
        steps,
        given,
    )
    wanted = exact.steps(kinds(heat), combined.tree.logprob.double()).float()
    torch.testing.assert_close(steps.cpu(), wanted, atol=1e-6, rtol=3e-5)


def test_no_requests(kernels):
    nobody = Combined.of(DraftTree.empty(0, 70, "cpu"), drafter=1)
    none = torch.zeros(0, dtype=torch.int64)
    steps, made, _, theirs = offered(kernels, nobody, none.bool(), none.float(), seed=0)
    assert steps.shape == (0, 70)
    for name, values in theirs.items():
        assert made[name].shape == values.shape, name
