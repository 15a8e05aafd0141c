"""A step is recorded, counted, learned from and judged in one launch each as by torch."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.tensors import assert_equal, column, on
from support.verification import (
    DEPTH,
    SPARE_SLOTS,
    falling_rates,
    some_requests,
    to_be_counted,
    verified_of,
)
from vllm_specblock.triton_kernels.feedback.count_step import Drafted
from vllm_specblock.triton_kernels.feedback.record_step import (
    SlabTensors,
    StepToRecord,
    record_step,
)
from vllm_specblock.triton_kernels.feedback.write_survival import Later, SeenNodes, marked

from vllm_specblock.engine.metrics.counters import DrafterCounters
from vllm_specblock.feedback.acceptance_estimator import NUM_BINS, AcceptanceEstimator
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.feedback.verified_trees import VerifiedTrees

from ..random_trees import random_trees

FAR = 2**40
LONGEST = 5


def some_slabs(
    seed: int, slabs: int, rows: int, hidden: int, slots: int, dtype: torch.dtype
) -> SlabTensors:
    """Slabs full of noise; most of them and most slots are in use."""
    draw = torch.Generator().manual_seed(seed)
    made = SlabTensors.empty(slabs, rows, hidden, slots, dtype)
    for each in (made.states, made.last):
        each.copy_(torch.randn(each.shape, generator=draw))
    made.token.random_(0, 1000, generator=draw)
    made.begin.random_(0, 40, generator=draw)
    made.end.copy_(made.begin + torch.randint(0, rows + 1, (slabs,), generator=draw))
    owners = torch.randperm(slots - 1, generator=draw)[: max(0, slabs - 1)]
    made.of_slot[owners] = torch.randperm(slabs, generator=draw)[: len(owners)].int()
    made.missed.random_(0, 9, generator=draw)
    made.steps.random_(0, 9, generator=draw)
    return made


def some_step(
    seed: int, slabs: SlabTensors, requests: int, nodes: int, fillers: int, spread: bool
) -> StepToRecord:
    """A step of `requests` of the slots and `fillers` rows of the last one, which is unused.

    Positions are near those of the slabs; padding is in every request's rows.
    """
    draw = torch.Generator().manual_seed(seed)

    def among(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=draw)

    slots, (_, _, hidden) = len(slabs.of_slot), slabs.last.shape
    slot = torch.cat(
        [torch.randperm(slots - 1, generator=draw)[:requests], torch.full((fillers,), slots - 1)]
    )
    count = len(slot)
    real = among(1, LONGEST + 1, count)
    padded = real + among(0, 2, count)
    start = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    request = torch.arange(count).repeat_interleave(padded)
    local = torch.arange(len(request)) - start[request]
    slab = slabs.of_slot[slot].long()
    first = torch.where(slab >= 0, slabs.begin[slab] + among(-6, slabs.token.shape[1], count), 7)
    position = first.clamp(min=0)[request] + local
    batch = len(request) + 5
    kept = local < real[request]
    source = torch.randperm(batch, generator=draw)[: len(request)]
    parent = among(-1, nodes, slots, nodes).int()
    path = among(0, nodes, count, LONGEST + 1)
    path[:, 0] = 0
    accepted = among(0, LONGEST, count).int()
    path[torch.arange(LONGEST + 1) > accepted[:, None]] = FAR
    run = among(0, nodes, count) * (among(0, 3, count) > 0)
    origin = (among(0, 3, slots, nodes) > 0).to(torch.uint8)
    *states, last = (
        torch.randn(batch, hidden + 3, generator=draw).to(slabs.last.dtype)[:, :hidden]
        for _ in range(4)
    )
    ours = (slot, run, accepted)
    if spread:
        ours, path = tuple(map(column, ours)), torch.nn.functional.pad(path, (0, 2), value=FAR)
        path = path[:, : LONGEST + 1]
    result = VerifiedTrees(*ours, path, None, origin, None)
    return StepToRecord(
        request,
        source,
        torch.where(kept, among(0, 30_000, len(request)), 0),
        position,
        torch.where(kept, among(0, 999, len(request)), -1),
        start[:-1] + real - 1,
        tuple(states),
        last,
        result,
        parent,
    )


SHAPES = [
    # slabs, rows of each, Ht, slots, requests, nodes
    (1, 5, 1, 3, 1, 1),
    (4, 9, 7, 7, 6, 12),
    (3, 33, 96, 6, 4, 60),
    (5, 16, 1030, 9, 8, 3),
    (16, 64, 24, 40, 37, 256),
]


@pytest.mark.parametrize(
    ("dtype", "spread"), [(torch.bfloat16, False), (torch.float32, True)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_records_as_torch(kernels, dtype, shape, spread):
    slabs, rows, hidden, slots, requests, nodes = shape
    for seed in range(2):
        made = some_slabs(seed, slabs, rows, hidden, slots, dtype)
        step = some_step(seed, made, requests, nodes, spread=spread, fillers=seed)
        mine = on(kernels.device, made)
        kernels.load("record_step").record_step_triton(mine, on(kernels.device, step))
        record_step.reference(made, step)
        assert_equal(mine, made)


# ---- Counters ----
def counted_twice(kernels, drafters: int):
    """Counters by torch, and what counts into them and by the kernel."""
    mine, theirs = DrafterCounters(drafters, kernels.device), DrafterCounters(drafters, "cpu")
    launch = kernels.load("count_step").count_step_triton

    def count(verified, drafted):
        theirs.count(to_be_counted(*verified), drafted)
        origin, *columns, path = verified
        spread = origin, *(column(x, other=1) for x in columns), path
        if drafted is not None:
            drafted = Drafted._make(None if x is None else column(x, other=1) for x in drafted)
        there, drafted = on(kernels.device, (spread, drafted))
        launch(mine.total, to_be_counted(*there), drafted)
        assert mine.total.tolist() == theirs.total.tolist()

    return theirs, count


def some_verified(count: int, nodes: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Origins by slot, slots and nodes that were run of a dtype, paths.

    Beyond the nodes that were run an earlier tree's path goes on.
    """
    origin = torch.randint(0, 4, (count + 3, nodes), dtype=torch.uint8)
    run = torch.randint(0, nodes + 1, (count,)) * (torch.rand(count) > 0.3)
    path = torch.randint(0, nodes + 1, (count, DEPTH + 1))
    path[:, 0] = 0
    return origin, torch.randperm(count + 3, dtype=dtype)[:count], run.to(dtype), path


# 2048 places for nodes in a program: 128 requests with 16 of them, 8 with 256.
@pytest.mark.parametrize(("count", "nodes"), [(3, 1), (300, 12), (19, 200), (0, 12)])
@pytest.mark.parametrize("drafters", [1, 2])
def test_counts_as_torch(kernels, count, nodes, drafters):
    theirs, into = counted_twice(kernels, drafters)
    torch.manual_seed(count)
    for beta in (False, True):
        sizes = [torch.randint(0, 3, (count,), dtype=torch.int32) for _ in range(drafters)]
        live, second, agreed = (torch.rand(count) > chance for chance in (0.6, 0.2, 0.4))
        betas = [0.25 + 15 * torch.rand(count), None if beta else torch.rand(count)]
        flags = (live, second, agreed) if drafters == 2 else (live.long(), None, None)
        trees = [x for pair in zip(sizes, betas if beta else reversed(betas)) for x in pair]
        into(some_verified(count, nodes, torch.int32), Drafted(*flags, *trees))
    into(some_verified(count, nodes, torch.int64), None)
    nothing = theirs.total == 0
    assert count < 300 or int(nothing.sum()) == (2 if drafters == 1 else 0)


# ---- Calibration ----
def learn(kernels, calibration: DraftCalibration, verified, drafter: int) -> torch.Tensor:
    """Learn by the kernel -> β."""
    state = calibration.log, calibration.trees, calibration.own, calibration.own_trees
    launch = kernels.load("calibrate_drafts").update_calibration_triton
    return launch(*state, drafter, verified, calibration.rates)


# More requests than the program takes at once: 2048 / 8 nodes.
@pytest.mark.parametrize(
    ("count", "drafter", "apart"), [(1, 0, True), (7, 1, False), (7, 0, True), (300, 1, True)]
)
def test_learns_as_torch(kernels, count, drafter, apart):
    slots = count + SPARE_SLOTS if apart else 0
    mine, theirs = (DraftCalibration(device, slots) for device in (kernels.device, "cpu"))
    # The scheduler's placeholders.
    idle = SimpleNamespace(origin=[], chance=[], run=3, accepted=2, temperatures=0.0)
    for step in range(4):
        requests = [idle, *some_requests(count - 1, random.Random(10 * count + step))]
        torch.manual_seed(step)
        beta = theirs.learn_from(verified_of(requests), drafter)
        torch.manual_seed(step)
        found = learn(kernels, mine, verified_of(requests, kernels.device), drafter)
        for one, other in ((found, beta), (mine.log, theirs.log), (mine.own, theirs.own)):
            torch.testing.assert_close(one.cpu(), other, atol=1e-6, rtol=1e-5)
        assert mine.trees.tolist() == theirs.trees.tolist()
        assert mine.own_trees.tolist() == theirs.own_trees.tolist()
    if count > 3:
        assert not apart or 0 < int((theirs.own != 0).sum()) < slots
        assert (theirs.log != DraftCalibration("cpu").log).all(), "nothing was learned"


@pytest.mark.parametrize("accepted", [0, DEPTH])
def test_limits_of_what_is_learned(kernels, accepted):
    """A drafter that is always, or never, right: the end of the range, and no further."""
    mine, theirs = DraftCalibration(kernels.device), DraftCalibration("cpu")
    mine.rates = theirs.rates = mine.rates._replace(lowest=0.1, highest=0.5)
    one = {"origin": [1] * DEPTH, "run": DEPTH, "accepted": accepted, "chance": [0.5] * DEPTH}
    requests = [SimpleNamespace(**one, temperatures=heat) for heat in [0.0, 1.5] * 40]
    for _ in range(3):
        learn(kernels, mine, verified_of(requests, kernels.device), 0)
        theirs.learn_from(verified_of(requests), 0)
    end = pytest.approx([0.5 if accepted else 0.1] * 2)
    assert mine.log.tolist() == end and theirs.log.tolist() == end


# ---- Survival, in double precision ----
def survival_of(seen: SeenNodes, heat: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Probability to reach each node: on a line between the rates of two bins' middles."""
    found = torch.zeros(score.shape, dtype=torch.float64)
    for out, row, kind in zip(found, score, (heat > 0).long()):
        rates = falling_rates(seen, int(kind))
        place = np.clip(-seen.bins_per_nat * row.double().numpy(), 0, NUM_BINS - 1e-3) - 0.5
        likely = np.minimum.accumulate(np.interp(place, np.arange(NUM_BINS), rates))
        out.copy_(torch.from_numpy(likely).where(row.isfinite(), 0.0))
    return found


def assert_exact(forms, score: torch.Tensor, heat: torch.Tensor, most: float = 50.0):
    """Hold a form's `steps`, and its marks of later blocks' nodes, to exact ones -> those.

    Counts neither fall with the score nor are alike by kind; `most` is of a bin.
    """
    draw = torch.Generator().manual_seed(score.shape[1])
    judged = most * torch.rand(2, NUM_BINS, generator=draw) ** 3
    reached = judged * torch.rand(2, NUM_BINS, generator=draw)
    seen = AcceptanceEstimator("cpu").seen._replace(judged=judged, reached=reached)
    (count, num_nodes), size = score.shape, len(score) + 4
    slots = torch.randperm(size, generator=draw)[:count]
    by_slot = torch.full((size, num_nodes), float("nan"))
    by_slot[slots] = score
    depth = torch.randint(0, 9, (size, num_nodes + 1), generator=draw)
    origin = torch.randint(0, 4, (size, num_nodes), generator=draw).byte()
    steps = torch.full((count + 2, num_nodes), -7.0)
    given = column(slots), by_slot, column(heat), seen, steps, Later(depth, origin, 4, 2)
    given = on(forms.device, given)
    forms.load("write_survival").write_survival_triton(*given)

    survival, steps = survival_of(seen, heat, score), given[4].cpu()
    before = torch.cat([torch.ones(count, 1), survival[:, :-1]], 1)
    wanted = torch.where(before > 0, survival / before.clamp(min=1e-300), 0.0).float()
    torch.testing.assert_close(steps[:count], wanted, atol=1e-6, rtol=3e-5)
    assert (steps[count:] == -7).all() and (steps[:count, 1:] <= 1).all(), "survival rises"
    deep = (depth[slots, 1:] > 4) & (origin[slots] < 2) & (wanted > 0)
    assert np.array_equal(marked(steps[:count].numpy()), deep.numpy())
    return wanted


def test_a_marked_1_is_less(forms):
    later = Later(torch.tensor([[0, 5, 1, 5, 5]]), torch.ones(1, 4).byte(), 4, 2)
    certain = AcceptanceEstimator("cpu").seen._replace(believed=torch.ones(NUM_BINS))
    score, slot = torch.tensor([[0.0, 0.0, 0.0, -torch.inf]]), torch.zeros(1, dtype=torch.int64)
    given = on(forms.device, (slot, score, torch.zeros(1), certain, score, later))
    forms.load("write_survival").write_survival_triton(*given)
    steps = given[4].cpu()
    assert marked(steps.numpy()).tolist() == [[True, False, True, False]]
    assert steps[0, 0] < 1 and steps[0, 1] == 1 and steps[0, 3] == 0
    torch.testing.assert_close(steps, torch.tensor([[1.0, 1.0, 1.0, 0.0]]))


@pytest.mark.parametrize(
    ("num_requests", "num_nodes"),
    [(0, 70), (1, 1), (1, 12), (5, 1), (4, 60), (3, 63), (3, 64), (2, 256)],
)
# Nothing yet; some steps; a large batch for hours.
@pytest.mark.parametrize("most", [0.0, 50.0, 3e6])
def test_survival_is_exact(forms, num_requests, num_nodes, most):
    score = random_trees(num_requests, num_nodes, fall=12 / (num_nodes + 8)).logprob
    heat = torch.tensor([0.0, 0.7, 1.3]).repeat(2)[:num_requests]
    steps = assert_exact(forms, score, heat, most)
    if num_requests > 2:
        assert (steps[1] == 0).all() and (steps[0] > 0).all(), "an empty tree and a full one"


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_scores_at_the_ends(forms, heat):
    """Scores above nothing and below all bins, the middles and the edges of bins."""
    score = torch.tensor([[0.3, 0.0, -0.125, -0.25, -0.26, -0.375, -7.9, -8.0, -300.0]])
    steps = assert_exact(forms, score, torch.tensor([heat]))
    assert steps.min() < 0.9 and steps.max() == 1, "the counts say too little"
