"""Sample-then-walk commits a text with the product of the target's probabilities along it.

That is the law of the papers' sequential rule. All draws are enumerated, none is sampled.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.trees import path_to, to_tree, walk

from vllm_specblock.tree import DraftTree

VOCAB = 5
TREES = {
    "tree": [(0, 1), (0, 2), (1, 0), (1, 3), (2, 1), (0, 4)],
    # Two heads side by side: 1 and 1 3 are drafted by both, and go on differently.
    "disjoint merge": [(0, 1), (0, 2), (1, 0), (1, 3), (0, 1), (5, 3), (6, 2), (5, 4)],
}


@pytest.mark.parametrize("name", TREES)
def test_texts_have_the_targets_law(name):
    plain = TREES[name]
    texts = [
        tuple(plain[step - 1][1] for step in path_to(plain, node)[1:])
        for node in range(len(plain) + 1)
    ]
    distinct = list(dict.fromkeys(texts))
    draw = torch.Generator().manual_seed(3)
    logits = 1.5 * torch.randn(len(distinct), VOCAB, generator=draw, dtype=torch.float64)
    target = dict(zip(distinct, logits.softmax(-1)))  # it sees the text only

    # The noise is keyed by the position: nodes of equal text draw the same token.
    drawn = torch.cartesian_prod(*[torch.arange(VOCAB)] * len(distinct))
    chance = torch.stack([target[key][tokens] for key, tokens in zip(distinct, drawn.T)]).prod(0)
    sampled = drawn[:, [distinct.index(key) for key in texts]]
    one = to_tree([plain], len(plain))
    fields = (getattr(one, name) for name in DraftTree.TENSORS)
    tree = DraftTree(*(each.expand(len(drawn), *each.shape[1:]) for each in fields))
    output, accepted, _ = walk(tree, tree.parent >= 0, sampled, int(one.depth.max()))

    outcomes, which = torch.cat([accepted[:, None], output], 1).unique(dim=0, return_inverse=True)
    law = torch.zeros(len(outcomes), dtype=torch.float64).index_add(0, which, chance)
    assert float(law.sum()) == pytest.approx(1) and len(outcomes) > 2 * VOCAB
    for (accepted, *output), share in zip(outcomes.tolist(), law.tolist()):
        wanted = [float(target[tuple(output[:at])][output[at]]) for at in range(accepted + 1)]
        assert share == pytest.approx(math.prod(wanted)), output
