"""The heads over paged caches draft what their learners draft along one text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from baselines.checkpoint import FILES
from baselines.falcon import Falcon, FalconDrafter
from baselines.medusa import Medusa, MedusaDrafter
from baselines.parallelspec import ParallelSpec, ParallelSpecDrafter
from support.baseline_batches import HIDDEN, TARGET_CONFIG, VOCAB, embed, vocabulary
from support.committed import advance, rows_of
from support.trees import assert_same_tree, texts

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.registry import DRAFTERS
from vllm_specblock.train.learner import EvalSequence

PAGE, MAX_LEN, NODES, LAST = 16, 64, 20, 3
CASES = {
    "medusa": (Medusa, MedusaDrafter, {"num_heads": 3, "num_layers": 2, "budget": NODES}),
    "parallelspec": (ParallelSpec, ParallelSpecDrafter, {"block_size": 4, "budget": NODES}),
    "falcon, 2": (Falcon, FalconDrafter, {"block_size": 2, "lstm_layers": 2, "budget": NODES}),
    "falcon, 4": (Falcon, FalconDrafter, {"block_size": 4, "forwards": 2, "budget": NODES}),
}
READS = {"medusa": (LAST,)}
"""Which of the states a kind reads where it is not the first three."""


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """A learner, and the head that serves what it saved; the learner reads it back, too."""
    make, kind, sizes = CASES[request.param]
    d2t, t2d, _ = vocabulary()
    learner = make.for_target(TARGET_CONFIG, d2t, t2d, 0, **sizes).eval()
    with torch.no_grad():
        for weight in learner.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    learner.save(tmp_path)
    assert kind_of(tmp_path) == kind.kind
    drafter = FILES.load(tmp_path).eval()
    learner.load_state_dict(drafter.state_dict(), strict=False)
    process_after_loading(drafter, None)
    return learner, serve(kind, drafter, calibrate_drafts=False)


def serve(kind, drafter, nodes: int = NODES, lookahead: int | None = None, **options):
    """A head on noisy caches: nothing of the noise may be seen."""
    head = kind(
        drafter,
        embed,
        DRAFTERS[kind.kind].options(**options),
        nodes,
        MAX_LEN,
        lookahead,
        READS.get(kind.kind, (0, 1, 2)),
    )
    caches = [
        torch.randn(
            12, PAGE * layer.entries_per_token, layer.num_kv_heads, 2 * layer.head_dim
        ).transpose(1, 2)
        for layer in head.cache_layers()
    ]
    head.bind(caches)
    head.caches = caches
    return head


def made_up(requests: int):
    """States [L, R, n, Ht], of three layers and of what the LM head reads; texts [R, n + 1]."""
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(4, requests, MAX_LEN, HIDDEN, generator=draw)
    text = torch.randint(0, VOCAB, (requests, MAX_LEN + 1), generator=draw)
    return states, text


def script_of(states, text, request: int) -> EvalSequence:
    hidden = states[:3, request].transpose(0, 1).flatten(1)
    return EvalSequence(text[request, :MAX_LEN], 1, hidden, states[LAST, request], embed)


@torch.no_grad()
def test_served_as_learned(pair):
    """Two requests, prompts in two chunks, then decode steps with rejected nodes as padding."""
    learner, head = pair
    states, text = made_up(2)
    drafts = [learner.draft_along(script_of(states, text, request)) for request in range(2)]
    tables = torch.tensor([[3, 7, 1, 5], [4, 2, 8, 11]])
    for requests, padding in (
        ([(0, 19), (0, 6)], 0),
        ([(19, 20), (6, 9)], 0),
        ([(20, 23), (9, 10)], 4),
        ([(23, 24), (10, 33)], 8),
    ):
        advance(head, rows_of(requests, tables, states, text, PAGE, padding))
        tree = head.draft()
        assert tree.token.shape == (2, NODES)
        for request, (_, end) in enumerate(requests):
            assert_same_tree(tree, request, texts(drafts[request](end), 0), ties=1)


@torch.no_grad()
def test_a_masked_first_block_is_as_a_text_that_begins_later(pair):
    """RoPE is relative: positions may begin anywhere, and places in the table follow them."""
    learner, head = pair
    states, text = made_up(2)
    later = states[:, :, PAGE:], text[:, PAGE:]
    drafts = [learner.draft_along(script_of(*later, request)) for request in range(2)]
    tables = torch.tensor([[3, 7, 1, 5], [4, 2, 8, 11]])
    for requests in ([(16, 35), (16, 22)], [(35, 36), (22, 25)]):
        rows = rows_of(requests, tables, states, text, PAGE)
        kept = torch.cat([tables[:, 1:], torch.zeros_like(tables[:, :1])], 1).int()
        advance(head, replace(rows, index=rows.position - PAGE, block_table=kept))
        tree = head.draft()
        for request, (_, end) in enumerate(requests):
            assert_same_tree(tree, request, texts(drafts[request](end - PAGE), 0), ties=1)
