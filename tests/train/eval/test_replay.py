"""Replay against naive loops, and along sampled text against the target's exact law."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.targets import tiny_target
from support.trees import nodes, texts, to_tree

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.evaluate import sequences_from
from vllm_specblock.train.eval.replay import Replay, accepted_path, mean_tau, replay
from vllm_specblock.train.learner import EvalSequence

DEPTH = 3
target = pytest.fixture(tiny_target)


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


@settings(max_examples=60, deadline=None)
@given(nodes(max_nodes=20, vocab=2), st.lists(st.integers(0, 1), max_size=6))
def test_the_accepted_path_is_the_longest_path_that_matches(tree, wanted):
    tree = to_tree([tree], 24)
    paths = texts(tree, 0)
    expected = max(k for k in range(len(wanted) + 1) if not k or tuple(wanted[:k]) in paths)
    assert len(accepted_path(tree, wanted)) - 1 == expected


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
    found = replay(drawn_tree, script_of(tokens, prompt), DEPTH)
    assert (found.accepted, found.nodes) == (accepted, sizes)
    assert {0, 1, 2} <= set(accepted)
    assert found.tau == pytest.approx(1 + sum(accepted) / len(accepted))


def test_mean_tau_counts_steps_and_not_texts():
    drawn = torch.Generator().manual_seed(1)
    sequences = [
        script_of(torch.randint(2, (length,), generator=drawn).tolist(), 2) for length in (12, 50)
    ]
    tau, steps = mean_tau(lambda sequence: drawn_tree, sequences, DEPTH)
    each = [replay(drawn_tree, sequence, DEPTH).accepted for sequence in sequences]
    assert steps == len(each[0]) + len(each[1])
    assert tau == pytest.approx(1 + (sum(each[0]) + sum(each[1])) / steps)
    assert tau != pytest.approx(sum(Replay(part, []).tau for part in each) / 2)


def test_texts_without_a_step_are_an_error():
    with pytest.raises(TrainError, match="needs 5 tokens after the prompt"):
        mean_tau(lambda sequence: drawn_tree, [script_of([0] * 6, 2)], DEPTH)
    assert mean_tau(lambda sequence: drawn_tree, [script_of([0] * 7, 2)], DEPTH)[1] == 1


@torch.no_grad()
def expected_accepted(target, tokens: list[int], tree) -> float:
    """Σ over the nodes of the target's probability of the path to the node, at T = 1."""
    paths = list(texts(tree, 0))
    rows = torch.zeros(len(paths), len(tokens) + max(map(len, paths)), dtype=torch.int64)
    for row, path in zip(rows, paths):
        row[: len(tokens) + len(path)] = torch.tensor([*tokens, *path])
    target_probs = target(input_ids=rows).logits.log_softmax(-1)
    total = 0.0
    for row, path in enumerate(paths):
        places = range(len(tokens) - 1, len(tokens) - 1 + len(path))
        total += (
            sum(target_probs[row, place, token] for place, token in zip(places, path)).exp().item()
        )
    return total


@torch.no_grad()
def likely_tree(target, tokens: list[int]):
    """The target's 3 best next tokens, and below each of them the 2 best: 9 nodes."""
    first = target(input_ids=torch.tensor([tokens])).logits[0, -1].topk(3).indices.tolist()
    rows = torch.tensor([[*tokens, token] for token in first])
    second = target(input_ids=rows).logits[:, -1].topk(2).indices.tolist()
    below = [(parent, token) for parent, row in enumerate(second, 1) for token in row]
    return to_tree([[(0, token) for token in first] + below], 9)


def surprise(target, temperature: float) -> tuple[float, float]:
    """How far the accepted lengths of all steps lie from what the target's law expects at their
    roots, in standard errors, and the mean τ. Given its root, a step's expectation is 0."""
    prompts = torch.randint(20, (10, 4), generator=torch.Generator().manual_seed(5))
    sequences = sequences_from(
        target, list(prompts), 25, temperature=temperature, seed=3, layer_ids=(2, 3, 4)
    )
    excess, taus = [], []
    for sequence in sequences:
        expected: list[float] = []
        whole = sequence.tokens.tolist()

        def draft(root, tokens=whole, expected=expected):
            tree = likely_tree(target, tokens[: root + 1])
            expected.append(expected_accepted(target, tokens[: root + 1], tree))
            return tree

        result = replay(draft, sequence, 2)
        taus.append(result.tau)
        excess += [got - wanted for got, wanted in zip(result.accepted, expected)]
    excess = torch.tensor(excess)
    return float(excess.mean() / (excess.std() / len(excess) ** 0.5)), sum(taus) / len(taus)


def test_sampled_texts_are_accepted_as_the_targets_law_says(target):
    error, tau = surprise(target, 1.0)
    assert abs(error) < 3.5
    assert 1.3 < tau < 2.9
    # Texts of another temperature are not what T = 1 expects: the test can tell.
    assert abs(surprise(target, 0.5)[0]) > 5
