"""Replay against naive loops, and along sampled text against the target's exact law."""

from __future__ import annotations

import pytest
import torch
from support.trees import texts, to_tree

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.steps import replay
from vllm_specblock.train.learner import EvalSequence

DEPTH = 3


def script_of(tokens: list[int], prompt: int) -> EvalSequence:
    nothing = torch.empty(len(tokens), 0)
    return EvalSequence(torch.tensor(tokens), prompt, nothing, nothing, lambda ids: ids)


def drawn_tree(root: int):
    """A tree of up to DEPTH tokens of 0 and 1, another one at every root."""
    draw = torch.Generator().manual_seed(root)
    made: list[tuple[int, int]] = []
    depth = [0]
    for _ in range(6):
        parent = int(torch.randint(len(depth), (), generator=draw))
        if depth[parent] < DEPTH:
            made.append((parent, int(torch.randint(2, (), generator=draw))))
            depth.append(depth[parent] + 1)
    return to_tree([made], 8)


@pytest.mark.parametrize("prompt", [1, 5])
def test_replay_walks_as_a_naive_loop(prompt):
    tokens = torch.randint(2, (60,), generator=torch.Generator().manual_seed(9)).tolist()
    accepted, sizes, root = [], [], prompt
    while len(tokens[root + 1 :]) >= DEPTH + 1:
        tree = drawn_tree(root)
        paths = texts(tree, 0)
        count = 0
        while tuple(tokens[root + 1 : root + 2 + count]) in paths:
            count += 1
        accepted.append(count)
        sizes.append(int(tree.size[0]))
        root += 1 + count
    found = replay(lambda sequence: drawn_tree, [script_of(tokens, prompt)], DEPTH)
    assert (found.accepted, found.nodes) == (accepted, sizes)
    assert {0, 1, 2} <= set(accepted)
    assert found.tau == pytest.approx(1 + sum(accepted) / len(accepted))


def test_texts_without_a_step_are_an_error():
    with pytest.raises(TrainError, match="needs 5 tokens after the prompt"):
        replay(lambda sequence: drawn_tree, [script_of([0] * 6, 2)], DEPTH)
    assert len(replay(lambda sequence: drawn_tree, [script_of([0] * 7, 2)], DEPTH).accepted) == 1
