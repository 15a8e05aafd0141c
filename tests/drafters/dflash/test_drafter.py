"""DFlash and JetSpec drafters on a paged cache draft the best paths of plainly computed blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.committed import advance, rows_of
from support.host_reads import NoHostReads
from support.mask_blocks import (
    KINDS,
    MAX_LEN,
    NODES,
    PAGE,
    TABLES,
    best_paths,
    made_up,
    make_drafter,
    masks_of,
    plain_logprobs,
)
from support.trees import assert_same_tree, texts

from vllm_specblock.drafters.common import network_drafter


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("options", [{}, {"depth": 2}, {"calibrate_drafts": False}])
@torch.no_grad()
def test_paged_equals_plain(kind, options):
    """Two requests, prompts in two chunks, then two decode steps with rejected nodes as padding."""
    drafter = make_drafter(kind, **options)
    drafter.beta = None if drafter.calibration is None else torch.tensor([1.3, 0.7])
    states, text = made_up(2)
    for requests, padding in (
        ([(0, 9), (0, 6)], 0),
        ([(9, 13), (6, 7)], 0),
        ([(13, 16), (7, 8)], 4),
        ([(16, 17), (8, 12)], 8),
    ):
        advance(drafter, rows_of(requests, TABLES, states, text, PAGE, padding))
        tree = drafter.draft()
        assert tree.token.shape == (2, NODES)
        for request, (_, end) in enumerate(requests):
            beta = 1.0 if drafter.beta is None else float(drafter.beta[request])
            masks = options.get("depth", masks_of(kind))
            says = plain_logprobs(kind, states[:, request], text[request], end, masks, beta)
            assert_same_tree(tree, request, best_paths(says))
    some = drafter.draft(torch.tensor([1]))
    assert texts(some, 0) == pytest.approx(texts(tree, 1), abs=1e-4)


@torch.no_grad()
def test_a_masked_first_block_is_as_a_text_that_begins_later(kind):
    drafter = make_drafter(kind)
    drafter.beta = torch.tensor([1.3, 0.7])
    states, text = made_up(2)
    for requests in ([(PAGE, PAGE + 9), (PAGE, PAGE + 6)], [(PAGE + 9, PAGE + 13), (PAGE + 6, 23)]):
        rows = rows_of(requests, TABLES, states, text, PAGE)
        kept = torch.cat([TABLES[:, 1:], torch.zeros_like(TABLES[:, :1])], 1).int()
        advance(drafter, replace(rows, index=rows.position - PAGE, block_table=kept))
        tree = drafter.draft()
        for request, (_, end) in enumerate(requests):
            beta = float(drafter.beta[request])
            of = states[:, request, PAGE:], text[request, PAGE:]
            says = plain_logprobs(kind, *of, end - PAGE, masks_of(kind), beta)
            assert_same_tree(tree, request, best_paths(says))


@torch.no_grad()
def test_long_prompts_are_taken_in_parts(kind, monkeypatch):
    states, text = made_up(2)
    rows = rows_of([(0, 33), (0, 6)], TABLES, states, text, PAGE)
    whole = make_drafter(kind)
    advance(whole, rows)
    monkeypatch.setattr(network_drafter, "MAX_ROWS", 7)
    parts = make_drafter(kind)
    advance(parts, rows)
    for request in range(2):
        wanted = texts(whole.draft(), request)
        assert texts(parts.draft(), request) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("room", [0, 1, 2, 3, 9])
@torch.no_grad()
def test_near_the_length_limit_masks_without_a_slot_draft_nothing(kind, room):
    """A root at MAX_LEN − room has room − 1 positions behind it."""
    drafter = make_drafter(kind)
    drafter.beta = torch.tensor([1.3])
    states, text = made_up(1)
    before = [cache.clone() for cache in drafter.attention_builder.caches]
    end = MAX_LEN - room
    advance(drafter, rows_of([(0, end)], TABLES[:1], states, text, PAGE))
    tree = drafter.draft()
    depth = max((len(path) for path in texts(tree, 0)), default=0)
    masks = masks_of(kind)
    assert depth == min(masks, max(0, room - 1))
    # Masks that have a slot see none of those that have none, which are later ones.
    there = masks if kind == "dflash" else min(masks, room - 1)
    if 0 < there < room:
        says = plain_logprobs(kind, states[:, 0], text[0], end, there, float(drafter.beta[0]))
        assert_same_tree(tree, 0, best_paths(says))
    for cache, was in zip(drafter.attention_builder.caches, before):
        changed = (cache != was).any(-1).any(1).any(-1).nonzero().flatten().tolist()
        assert set(changed) <= {0, *TABLES[0].tolist()}, "a stranger's block was written"


@pytest.mark.parametrize(
    ("nodes", "lookahead", "depth", "found"), [(3, None, None, 3), (20, 2, None, 2), (20, 9, 1, 1)]
)
def test_no_path_is_deeper_than_slots_nodes_and_options_allow(kind, nodes, lookahead, depth, found):
    assert make_drafter(kind, nodes, lookahead, depth=depth).max_depth == found


@torch.no_grad()
def test_nothing_is_read_on_the_host(kind):
    drafter = make_drafter(kind)
    states, text = made_up(2)
    rows, wanted = rows_of([(0, 19), (0, 6)], TABLES, states, text, PAGE), torch.tensor([1])
    with NoHostReads():
        advance(drafter, rows)
        drafter.draft()
        drafter.draft(wanted)


@torch.no_grad()
def test_no_mask_of_a_causal_block_sees_a_later_one():
    """Those that are left out change nothing before them; DFlash's are read by all of a block."""
    states, text = made_up(1)

    def drafted(kind: str, depth: int) -> dict[tuple[int, ...], float]:
        drafter = make_drafter(kind, depth=depth, calibrate_drafts=False)
        advance(drafter, rows_of([(0, 19)], TABLES[:1], states, text, PAGE))
        return texts(drafter.draft(), 0)

    for kind, same in (("jetspec", True), ("dflash", False)):
        deep, shallow = drafted(kind, 4), drafted(kind, 2)
        above = {path: score for path, score in deep.items() if len(path) <= 2}
        assert len(above) > 3 and max(map(len, deep)) > 2
        found = {path: shallow.get(path) for path in above}
        assert (found == pytest.approx(above, abs=1e-4)) is same
