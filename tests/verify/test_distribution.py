"""Sample-then-walk commits a text with the product of the target's probabilities along it.

That is the law of the papers' sequential rule.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from support.trees import path_to, to_tree, walk

from vllm_specblock.tree import DraftTree

TREES = {
    "tree": [(0, 1), (0, 2), (1, 0), (1, 3), (2, 1), (3, 2), (0, 4)],
    # Two heads side by side: 1 and 1 3 are drafted by both, and go on differently.
    "disjoint merge": [(0, 1), (0, 2), (1, 0), (1, 3), (0, 1), (5, 3), (6, 2), (5, 4)],
}
VOCAB, RUNS = 5, 20_000


def text(plain, node: int) -> tuple[int, ...]:
    return tuple(plain[step - 1][1] for step in path_to(plain, node)[1:])


def target(plain) -> torch.Tensor:
    """[nodes + 1, V] float64, a random target that sees the text only."""
    known: dict[tuple, torch.Tensor] = {}
    draw = torch.Generator().manual_seed(3)
    for node in range(len(plain) + 1):
        logits = 1.5 * torch.randn(VOCAB, generator=draw, dtype=torch.float64)
        known.setdefault(text(plain, node), logits.softmax(-1))
    return torch.stack([known[text(plain, node)] for node in range(len(plain) + 1)])


def committed_law(plain, target_probs: torch.Tensor) -> dict[tuple, float]:
    """Committed text → its probability."""
    texts = [text(plain, node) for node in range(len(plain) + 1)]
    chance = {(): 1.0}
    for node in range(1, len(plain) + 1):  # parents first
        up = plain[node - 1][0]
        chance[texts[node]] = chance[texts[up]] * float(target_probs[up, texts[node][-1]])
    ends = {}
    for node, prefix in enumerate(texts):
        for token in range(VOCAB):
            if (*prefix, token) not in chance:
                ends[(*prefix, token)] = chance[prefix] * float(target_probs[node, token])
    assert sum(ends.values()) == pytest.approx(1.0)
    return ends


def walked(plain, target_probs: torch.Tensor) -> Counter:
    generator = torch.Generator().manual_seed(12)
    sampled = torch.multinomial(
        target_probs, RUNS, replacement=True, generator=generator
    ).T.contiguous()
    texts = [text(plain, node) for node in range(len(plain) + 1)]
    # The noise is keyed by the position: nodes of equal text draw the same token.
    sampled = sampled[:, [texts.index(own) for own in texts]]
    one = to_tree([plain], len(plain))
    tree = DraftTree(*(getattr(one, name)[[0] * RUNS] for name in DraftTree.TENSORS))
    outputs, accepted, _ = walk(tree, tree.parent >= 0, sampled, int(tree.depth.max()))
    return Counter(
        tuple(output[: count + 1]) for output, count in zip(outputs.tolist(), accepted.tolist())
    )


def excess(counts: Counter, target_probs: dict[tuple, float]) -> float:
    """Pearson's χ², in standard deviations above what the law itself gives."""
    if not counts.keys() <= target_probs.keys():  # a text that cannot be committed
        return math.inf
    common = {key: p for key, p in target_probs.items() if p * RUNS >= 5}
    rare = 1 - sum(common.values())
    cells = [(counts[key], p) for key, p in common.items()]
    if rare * RUNS >= 5:
        cells.append((RUNS - sum(seen for seen, _ in cells), rare))
    chi = sum((seen - RUNS * p) ** 2 / (RUNS * p) for seen, p in cells)
    freedom = len(cells) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", TREES)
def test_texts_have_the_targets_law(name):
    plain = TREES[name]
    target_probs = target(plain)
    assert excess(walked(plain, target_probs), committed_law(plain, target_probs)) < 4


def test_a_target_that_is_slightly_off_is_found_out():
    plain = TREES["tree"]
    target_probs = target(plain)
    other = target_probs**1.1
    off = walked(plain, other / other.sum(-1, keepdim=True))
    assert excess(off, committed_law(plain, target_probs)) > 8
