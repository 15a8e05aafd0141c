"""EAGLE-3 drafting along a text against the served head over a paged cache."""

from __future__ import annotations

import pytest
import torch
from support import committed
from support.trees import texts

from vllm_specblock.config import Eagle3Config
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.eval.eagle3_drafting import Eagle3Draft, serving_growth
from vllm_specblock.train.learner import EvalSequence

LENGTH, PAGE, H, V, VD = 40, 8, 32, 64, 40
ROOTS = (6, 7, 11, 20)


def scene(own_embedding: bool) -> tuple[Eagle3Model, EvalSequence]:
    torch.manual_seed(0)
    shape = Eagle3Shape(
        hidden_size=H,
        target_hidden_size=H,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=V,
        draft_vocab_size=VD,
    )
    drafter = Eagle3Model(shape, own_embedding).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.25)
        drafter.d2t.copy_(torch.randperm(V)[:VD].sort().values - torch.arange(VD))
    table = torch.randn(V, H)
    hidden = torch.randn(LENGTH, 3 * H)
    return drafter, EvalSequence(
        torch.randint(V, (LENGTH,)), 6, hidden, torch.empty(LENGTH, 0), lambda ids: table[ids]
    )


def served_trees(drafter, sequence, options, nodes):
    """The trees of a greedy request that is committed up to each of ROOTS in turn."""
    head = Eagle3Drafter(drafter, sequence.embed, options, nodes, max_model_len=96)
    pages = 96 // PAGE
    head.bind([torch.randn(pages + 1, PAGE, 2, 16).transpose(1, 2)])  # noise: never seen
    return committed.served_trees(head, sequence, ROOTS, pages, PAGE)


@pytest.mark.parametrize(
    ("options", "nodes", "own_embedding"),
    [
        ({}, 60, False),
        ({}, 60, True),
        ({"calibrate_drafts": False}, 30, False),
        ({"depth": 4, "top_k": 3}, 20, False),
        ({}, 5, False),  # fewer slots than levels times rows
    ],
)
@torch.no_grad()
def test_drafts_what_serving_drafts(options, nodes, own_embedding):
    drafter, sequence = scene(own_embedding)
    options = Eagle3Config(**options)
    calibration = DraftCalibration("cpu") if options.calibrate_drafts else None
    draft = Eagle3Draft(drafter, sequence, serving_growth(drafter, options, nodes), calibration)
    for root, served in zip(ROOTS, served_trees(drafter, sequence, options, nodes)):
        tree = draft(root)
        found, wanted = texts(tree, 0), texts(served, 0)
        assert list(found) == list(wanted)
        assert list(found.values()) == pytest.approx(list(wanted.values()), abs=1e-4)
        # A level is a forward.
        size = int(tree.size[0])
        assert draft.forwards().tolist()[:size] == [len(text) for text in found]
        assert not draft.forwards()[size:].any()
