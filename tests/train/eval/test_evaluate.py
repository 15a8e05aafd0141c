"""Figures against naive loops: one root after the other, plain Python counting."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.eval.chain import ChainFigures, bucket_figures, chain_along
from vllm_specblock.train.eval.drafting import draft_trees
from vllm_specblock.train.eval.evaluate import evaluate, shapes_of
from vllm_specblock.train.eval.steps import replay
from vllm_specblock.train.learner import EvalSequence

K, PROMPT, LENGTH = 4, 5, 90


@pytest.fixture
def scene(lucky):
    """A drafter and two texts; the rank head's guesses vary."""

    def make(**changes):
        drafter, tokens = lucky(2, LENGTH, **changes)
        with torch.no_grad():
            drafter.rank_head[2].weight.normal_(std=3.0)
            for weight in drafter.layers.parameters():
                if weight.dim() > 1:  # so that attention matters to the first choice
                    weight.normal_(std=0.3)
        embedding = torch.randn(20, 32)
        hidden = torch.randn(2, LENGTH, 96)
        sequences = [
            EvalSequence(text, PROMPT, states, torch.empty(LENGTH, 0), lambda ids: embedding[ids])
            for text, states in zip(tokens, hidden)
        ]
        return drafter.eval(), sequences

    return make


def flat(rows: list[list]) -> list:
    return [value for row in rows for value in row]


def judge(drafter, hidden, token: int):
    logits, rank_logits = drafter.heads(hidden)
    ranked = [int(i) for i in drafter.target_ids(logits.argsort(descending=True))]
    bucket = None
    if token in ranked:
        rank = ranked.index(token) + 1
        bucket = 0 if rank == 1 else 1 if rank <= 4 else 2 if rank <= 10 else 3
    return ranked[0] == token, bucket, int(rank_logits.argmax())


@pytest.mark.parametrize("changes", [{}, {"block_rope": "path"}])
@torch.no_grad()
def test_chain_figures_are_those_of_a_naive_loop(scene, inference, changes):
    drafter, sequences = scene(**changes)
    blocks = 3
    # A short one, and one of more roots than are drafted together.
    sequences = [sequences[0], dataclasses.replace(sequences[1], tokens=sequences[1].tokens[:60])]
    counts = [[0, 0] for _ in range(blocks * K)]
    confusion = [[0] * 4 for _ in range(4)]
    for sequence in sequences:
        tokens = sequence.tokens
        rows = inference(drafter, sequence.embed, tokens, sequence.hidden)
        for row, states in list(rows.blocks([K] * (blocks - 1)))[PROMPT - 1 : -1]:
            places = zip(torch.cat(states), tokens[row + 2 :].tolist())
            judged = [judge(drafter, state, token) for state, token in places]
            hits = [hit for hit, *_ in judged]
            for k, (hit, bucket, guess) in enumerate(judged):
                if all(hits[:k]):
                    counts[k][0] += hit
                    counts[k][1] += 1
                    if bucket is not None:
                        confusion[bucket][guess] += 1
    figures = ChainFigures.of([chain_along(drafter, s, blocks) for s in sequences], K)
    assert figures.alpha == [a / b if b else None for a, b in counts]
    assert figures.positions == [b for _, b in counts]
    assert flat(figures.alpha_mj) == figures.alpha and len(figures.alpha_mj) == blocks
    assert figures.rank == bucket_figures(torch.tensor(confusion))
    assert figures.rank_positions == sum(map(sum, confusion))
    assert figures.positions[K] > 2
    assert sum(map(bool, flat(confusion))) > 6  # many kinds of right and wrong


def test_bucket_figures_count_as_precision_and_recall_do():
    truth, guess = [0, 0, 0, 1, 1, 3, 3, 3], [0, 0, 1, 1, 0, 3, 1, 0]
    confusion = [[0] * 4 for _ in range(4)]
    for pair in zip(truth, guess):
        confusion[pair[0]][pair[1]] += 1
    first, second, third, last = (
        tuple(bucket.values()) for bucket in bucket_figures(torch.tensor(confusion))
    )
    assert first == pytest.approx((3 / 8, 2 / 4, 2 / 3, 4 / 7))
    assert second == pytest.approx((2 / 8, 1 / 3, 1 / 2, 2 / 5))
    assert third == (0.0, None, None, None)
    assert last == pytest.approx((3 / 8, 1.0, 1 / 3, 1 / 2))


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_figures_of_several_trees_in_one_pass(scene, temperature):
    """Every shape learns its own sharpness from text to text, where there is a temperature."""
    drafter, sequences = scene()
    shapes = shapes_of(drafter, SpecBlockConfig(num_starts=3), (12, 30))
    chains = ["chain of 1 block", "chain of 2 blocks"]
    assert list(shapes) == [*chains, "tree of 12", "tree of 30"]
    figures = evaluate(drafter, iter(sequences), shapes, 2, temperature)
    assert (figures.texts, figures.new_tokens) == (2, 2 * (LENGTH - PROMPT))
    for name, shape in shapes.items():
        beta = None if temperature is None else DraftCalibration("cpu", num_slots=1)
        how = shape, beta, temperature or 0.0
        whole = replay(lambda s, how=how: draft_trees(drafter, s, *how), sequences, 8)
        found, steps = figures.trees[name], len(whole.accepted)
        assert (found.tau, found.steps) == (whole.tau, steps)
        if beta is not None:
            assert found.sharpness == float(beta.of(torch.tensor([temperature])))
            # The outcome of a text's last step is not known.
            assert int(beta.trees.sum()) == steps - len(sequences)
    trees = figures.trees
    assert trees["tree of 30"].tau > trees["chain of 2 blocks"].tau > 1.3
    assert (trees["chain of 2 blocks"].nodes, trees["tree of 12"].nodes) == (8, 12)
    if temperature is not None:
        assert trees["tree of 12"].sharpness != trees["tree of 30"].sharpness
    text = json.dumps(figures.as_json(), allow_nan=False)
    assert json.loads(text)["chain"]["rank"][0].keys() == {"frequency", "precision", "recall", "f1"}
