"""Steps along a text against those of a request in pages of other sizes and places."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import committed
from support.eagle3 import small_eagle3
from support.records import small_drafter
from support.trees import texts
from vllm_specblock.triton_kernels.drafting.expand import TreeShape

from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.options import Eagle3Config, SpecBlockConfig
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.eval.drafting import (
    chain_shape,
    draft_trees,
    serving_shape,
)
from vllm_specblock.train.learner import EvalSequence

LENGTH, PAGE, PAGES, VOCAB, HIDDEN = 40, 8, 12, 20, 32
ROOTS = (6, 7, 11, 20)
WIDE = {"num_blocks": 3, "num_starts": 3, "branching": [8, 8, 8, 8]}


def with_sequence(drafter):
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.25)
    embedding = torch.randn(VOCAB, HIDDEN)
    return drafter.eval(), EvalSequence(
        torch.randint(VOCAB, (LENGTH,)),
        6,
        torch.randn(LENGTH, 3 * HIDDEN),
        torch.randn(LENGTH, HIDDEN),
        lambda tokens: embedding[tokens],
    )


@torch.no_grad()
def trees_like_served(draft, head, caches, sequence):
    """Yield every tree of `draft` with its texts: those of a greedy request of the head, which is
    committed up to each of ROOTS in turn."""
    head.bind(caches)  # noise in the caches: nothing of it may be seen
    served = committed.served_trees(head, sequence, ROOTS, PAGES, PAGE)
    for root, wanted in zip(ROOTS, (texts(tree, 0) for tree in served)):
        tree = draft(root)
        found = texts(tree, 0)
        assert list(found) == list(wanted)
        assert list(found.values()) == pytest.approx(list(wanted.values()), abs=1e-4)
        yield tree, found


def eagle3(own_embedding: bool = False):
    return small_eagle3(own_embedding, vocab_size=VOCAB, draft_vocab_size=14)


@pytest.mark.parametrize(
    ("model", "options", "nodes"),
    [
        (small_drafter, SpecBlockConfig(), 60),
        (small_drafter, SpecBlockConfig(calibrate_drafts=False), 60),
        (partial(small_drafter, block_rope="path"), SpecBlockConfig(**WIDE), 60),
        (small_drafter, SpecBlockConfig(num_blocks=3), 5),  # fewer slots than starts
        (partial(eagle3, True), Eagle3Config(), 60),
        (eagle3, Eagle3Config(depth=4, top_k=3), 20),
        (eagle3, Eagle3Config(), 5),  # fewer slots than levels times rows
    ],
)
def test_it_drafts_what_serving_drafts(model, options, nodes):
    drafter, sequence = with_sequence(model())
    calibration = DraftCalibration("cpu") if options.calibrate_drafts else None
    draft = draft_trees(drafter, sequence, serving_shape(drafter, options, nodes), calibration)
    levels = isinstance(options, Eagle3Config)
    kind, layers, entries = (Eagle3Drafter, 1, 1) if levels else (SpecBlockDrafter, 2, 4)
    head = kind(drafter, sequence.embed, options, nodes, max_model_len=96)
    caches = [torch.randn(PAGES + 1, PAGE * entries, 2, 16).transpose(1, 2) for _ in range(layers)]
    for tree, found in trees_like_served(draft, head, caches, sequence):
        if levels:  # a level is a forward
            size = int(tree.size[0])
            assert draft.forwards().tolist()[:size] == [len(text) for text in found]
            assert not draft.forwards()[size:].any()
    if calibration is not None:
        assert calibration.trees.tolist() == [len(ROOTS) - 1, 0]


def test_a_chain_is_the_best_token_of_every_position():
    drafter, sequence = with_sequence(small_drafter())
    tree = draft_trees(drafter, sequence, chain_shape(drafter, 3))(9)
    assert tree.parent[0].tolist() == list(range(12))
    wide = draft_trees(drafter, sequence, TreeShape(4, 3, 1, (5, 5, 5, 5), 200))(9)
    assert tuple(tree.token[0].tolist()) in texts(wide, 0)


@pytest.mark.parametrize(("nodes", "blocks"), [(12, 1), (15, 1), (16, 2), (60, 2)])
def test_small_trees_are_of_one_block_as_in_serving(nodes, blocks):
    drafter = small_drafter()
    assert serving_shape(drafter, nodes=nodes).num_blocks == blocks
    assert serving_shape(drafter, SpecBlockConfig(num_blocks=2), nodes).num_blocks == 2
