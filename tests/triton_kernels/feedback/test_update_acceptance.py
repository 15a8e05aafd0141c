"""One launch counts what the torch description of it counts."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from support.verification import DEPTH, verified_of

from vllm_specblock.feedback.acceptance_estimator import BINS_PER_NAT, AcceptanceEstimator
from vllm_specblock.feedback.verified_trees import VerifiedTrees


def launch(forms, table: AcceptanceEstimator, of: VerifiedTrees) -> None:
    forms.load("update_acceptance").update_acceptance_triton(
        table.judged, table.reached, of, BINS_PER_NAT, table.decay
    )


def random_verdicts(count: int, num_nodes: int, depth: int, seed: int) -> VerifiedTrees:
    """Trees whose paths skip nodes; some cut, some nodes of nobody, some scores of no node."""
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(shape, generator=draw)

    slots = count + 3
    req_idx = torch.randperm(slots, generator=draw)[:count].int()
    score = (-10 * rand(slots, num_nodes)).sort(1, descending=True).values + 0.2
    score[rand(slots, num_nodes) < 0.1] = float("-inf")
    origin = torch.randint(0, 4, (slots, num_nodes), generator=draw).to(torch.uint8)
    num_run = torch.randint(0, num_nodes + 1, (count,), generator=draw).int()
    path = torch.zeros(count, depth + 1, dtype=torch.int64)
    accepted = torch.zeros(count, dtype=torch.int32)
    for request, run in enumerate(num_run.tolist()):
        # Now and then a path of a step before, over nodes that were not run in this one.
        known = num_nodes if request % 3 == 2 else run
        length = int(rand() * (min(known, depth) + 1))
        nodes = 1 + torch.randperm(known, generator=draw)[:length].sort().values
        accepted[request], path[request, 1 : length + 1] = length, nodes
        path[request, length + 1 :] = num_nodes  # beyond the end nothing counts
    temperatures = torch.where(rand(slots) < 0.5, 0.0, rand(slots) + 0.1)
    return VerifiedTrees(req_idx, num_run, accepted, path, score, origin, temperatures)


def in_tables(of: VerifiedTrees, device: torch.device) -> VerifiedTrees:
    """As a graph has them: what is of requests lies in columns of tables full of garbage."""

    def column(x):
        table = torch.full((len(x), 3), 1 << 20, dtype=torch.int64)
        table[:, 1] = x
        return table.to(device)[:, 1]

    path = torch.full((len(of.path), of.path.shape[1] + 4), 1 << 40)
    path[:, : of.path.shape[1]] = of.path
    path = path.to(device)[:, : of.path.shape[1]]
    rest = (x.to(device) for x in (of.score, of.origin, of.temperatures))
    return VerifiedTrees(
        column(of.req_idx), column(of.num_run), of.accepted.to(device), path, *rest
    )


# More requests than the program takes at once: 2048 / 64 trees, 2048 / 16 paths.
@pytest.mark.parametrize(
    ("count", "num_nodes", "depth"),
    [(1, 60, 12), (3, 1, 1), (7, 13, 5), (5, 256, 30), (150, 60, 11)],
)
def test_as_torch_learns(forms, count, num_nodes, depth):
    mine, theirs = AcceptanceEstimator(forms.device), AcceptanceEstimator("cpu")
    for step in range(3):
        verified = random_verdicts(count, num_nodes, depth, seed=step + count)
        theirs.learn_from(verified)
        launch(forms, mine, in_tables(verified, forms.device))
        torch.testing.assert_close(mine.judged.cpu(), theirs.judged, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.reached.cpu(), theirs.reached, atol=1e-5, rtol=1e-5)
    if count > 5:
        assert (theirs.reached.sum(1) > 0).all() and (theirs.reached < theirs.judged).any()


def some_requests(seed: int) -> list[SimpleNamespace]:
    draw = random.Random(seed)
    one = {"origin": [1] * DEPTH, "run": DEPTH, "chance": [0.9, 0.8, 0.5, 0.3, 1e-6]}
    return [
        SimpleNamespace(
            **one, accepted=draw.randint(0, DEPTH), temperatures=draw.choice([0.0, 0.7])
        )
        for _ in range(9)
    ]


def test_nobody_looks_at_what_is_not_there(forms):
    """Slots and nodes that are noise (NaN), as `verified_of` leaves them."""
    mine, theirs = AcceptanceEstimator(forms.device), AcceptanceEstimator("cpu")
    verified = verified_of(some_requests(0))
    score = verified.score.nan_to_num(nan=float("-inf"))  # torch looks at all of them
    theirs.learn_from(VerifiedTrees(**vars(verified) | {"score": score}))
    on = {name: x.to(forms.device) for name, x in vars(verified).items()}
    launch(forms, mine, VerifiedTrees(**on))
    assert torch.equal(mine.judged.cpu(), theirs.judged) and theirs.judged.sum() == 9 * DEPTH
    assert torch.equal(mine.reached.cpu(), theirs.reached) and theirs.reached.sum() > 0


def test_old_steps_fade_but_only_when_something_new_is_seen(forms):
    table = AcceptanceEstimator(forms.device, decay=0.5)
    verified = random_verdicts(4, 20, 5, seed=0)
    nothing = VerifiedTrees(**vars(verified) | {"num_run": torch.zeros(4, dtype=torch.int32)})
    launch(forms, table, in_tables(verified, forms.device))
    once = table.judged.clone()
    launch(forms, table, in_tables(nothing, forms.device))
    assert once.sum() > 0 and torch.equal(table.judged, once)
    launch(forms, table, in_tables(verified, forms.device))
    assert torch.equal(table.judged, 1.5 * once)
