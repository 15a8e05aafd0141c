"""Imposed acceptance: how often each node is reached, and what comes out."""

from __future__ import annotations

import pytest
import torch

from vllm_specblock.tree import DraftTree
from vllm_specblock.verify.synthetic_acceptance import SyntheticAcceptance

#  0 ─┬─ 1 (.6) ─┬─ 3 (.36 = .6 · .6)
#     ├─ 2 (.3)  └─ 4 (.18 = .6 · .3)
#     └─ 5 (.1)
PARENT = [0, 0, 1, 1, 0, -1]
SCORE = [0.6, 0.3, 0.36, 0.18, 0.1, 0.0]
TOKEN = [11, 12, 13, 14, 15, 0]
STEPS = 20_000


def tree_of(copies):
    def repeated(values, dtype):
        return torch.tensor(values, dtype=dtype).expand(copies, -1)

    size = torch.full((copies,), 5, dtype=torch.int32)
    score = repeated(SCORE, torch.float32).log()
    return DraftTree.from_nodes(
        repeated(TOKEN, torch.int64), repeated(PARENT, torch.int32), score, size
    )


def walked(seed, position, live=None, drawn=99):
    """The verdict on copies of the tree, one per entry of seed and position (both [R])."""
    tree = tree_of(len(position))
    imposed = SyntheticAcceptance(len(position), 6, torch.device("cpu"))
    slots = torch.arange(len(position))
    imposed.note(slots, tree.parent, tree.logprob)
    depth = torch.nn.functional.pad(tree.depth, (1, 0)).long()
    live = torch.ones(tree.token.shape, dtype=torch.bool) if live is None else live
    return imposed.accept_path(
        slots,
        seed,
        position[:, None] + depth,
        tree.token,
        tree.parent,
        depth,
        tree.ancestors,
        live,
        torch.full((len(position), 7), drawn),
        2,
    )


def test_every_node_is_reached_as_often_as_its_score_says():
    position = torch.arange(STEPS) * 3
    accepted_paths = walked(torch.full((STEPS,), 7), position)
    reached = (accepted_paths.path[:, 1:, None] == torch.arange(1, 6)).any(1).float().mean(0)
    assert reached.tolist() == pytest.approx(SCORE[:5], abs=0.015)
    assert accepted_paths.accepted.float().mean().item() == pytest.approx(1.54, abs=0.03)


def test_a_node_that_was_not_run_is_not_taken_and_nobody_is_in_its_place():
    live = torch.ones(STEPS, 6, dtype=torch.bool)
    live[:, 2] = False  # node 3
    accepted_paths = walked(torch.full((STEPS,), 7), torch.arange(STEPS) * 3, live)
    reached = (accepted_paths.path[:, 1:, None] == torch.arange(1, 6)).any(1).float().mean(0)
    assert reached.tolist() == pytest.approx([0.6, 0.3, 0.0, 0.18, 0.1], abs=0.015)


def test_the_output_is_the_path_and_then_what_was_drawn():
    accepted_paths = walked(torch.zeros(200, dtype=torch.int64), torch.arange(200) * 3)
    seen = set()
    for path, accepted, output in zip(
        accepted_paths.path.tolist(),
        accepted_paths.accepted.tolist(),
        accepted_paths.output.tolist(),
    ):
        expected = [TOKEN[node - 1] for node in path[1 : accepted + 1]] + [99]
        assert output == expected + [0] * (3 - len(expected))
        seen.add(tuple(path[1 : accepted + 1]))
    assert seen == {(), (1,), (2,), (5,), (1, 3), (1, 4)} - {()}, "1 − .6 − .3 − .1 leaves nothing"


def test_draws_go_by_seed_and_position_not_by_batch():
    seed, position = torch.tensor([3, 4, 3]), torch.tensor([50, 50, 50])
    together = walked(seed, position)
    assert torch.equal(together.path[0], together.path[2])
    alone = [walked(seed[:1] + i, position[:1]).path[0].tolist() for i in range(40)]
    assert together.path[1].tolist() == alone[1]
    assert len({tuple(path) for path in alone}) > 3


def test_a_forgotten_slot_takes_nothing():
    imposed = SyntheticAcceptance(2, 6, torch.device("cpu"))
    tree = tree_of(2)
    imposed.note(torch.tensor([0, 1]), tree.parent, tree.logprob)
    imposed.forget(1)
    assert imposed.high[0].any() and not imposed.high[1].any()
