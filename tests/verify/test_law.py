"""Sample-then-walk commits with the law of the papers' sequential rule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.trees import to_tree

from vllm_specblock.verify.reference import accept_sequentially
from vllm_specblock.verify.walk import walk

PLAIN = [(0, 1), (0, 2), (1, 0), (1, 3), (2, 1), (3, 2), (0, 4)]
VOCAB, RUNS = 5, 20_000


def law() -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    logits = 1.5 * torch.randn(len(PLAIN) + 1, VOCAB, generator=draw, dtype=torch.float64)
    return logits.softmax(-1)


def sequential(probabilities: torch.Tensor) -> Counter:
    generator = torch.Generator().manual_seed(11)
    children: dict[int, list[tuple[int, int]]] = {}
    for node, (up, token) in enumerate(PLAIN, 1):
        children.setdefault(up, []).append((node, token))
    return Counter(
        tuple(accept_sequentially(children, probabilities, generator)) for _ in range(RUNS)
    )


def walked(probabilities: torch.Tensor, seed: int = 12) -> Counter:
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.multinomial(probabilities, RUNS, replacement=True, generator=generator).T
    tree = to_tree([PLAIN], len(PLAIN))
    every = (RUNS, -1)
    depth = torch.nn.functional.pad(tree.depth.long(), (1, 0))
    verdict = walk(
        tree.token.expand(*every),
        tree.parent.expand(*every),
        depth.expand(*every),
        tree.ancestors.expand(*every, -1),
        torch.ones(RUNS, len(PLAIN), dtype=torch.bool),
        sampled.contiguous(),
        3,
    )
    return Counter(
        tuple(output[: count + 1])
        for output, count in zip(verdict.output.tolist(), verdict.accepted.tolist())
    )


def distance(left: Counter, right: Counter) -> float:
    """Total variation between two empirical laws of `RUNS` draws each."""
    return sum(abs(left[key] - right[key]) for key in left | right) / 2 / RUNS


def test_same_law():
    # Two samples of this size from one law over ~25 outcomes lie about 0.014 apart.
    assert distance(walked(law()), sequential(law())) < 0.025


@pytest.mark.parametrize("wrong", ["sharpened", "flattened"])
def test_the_distance_would_tell(wrong):
    """A target that is off by a little is found out."""
    power = {"sharpened": 1.15, "flattened": 0.85}[wrong]
    other = law() ** power
    assert distance(walked(other / other.sum(-1, keepdim=True)), sequential(law())) > 0.04
