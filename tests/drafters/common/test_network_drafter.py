"""Rows and requests in parts: a drafter drafts what it would from all of them at once."""

from __future__ import annotations

import pytest
import torch
from support.committed import rows_of
from support.lone_drafters import MAX_LEN, PAGE, head_of
from support.trees import texts

from vllm_specblock.drafters.common import network_drafter


# A prompt of several parts between requests that decode, with rejected nodes as padding.
@pytest.mark.parametrize(
    ("lengths", "padding"), [([9, 70, 5], 0), ([3, 2, 4], 4), ([60], 0), ([20, 20, 20], 0)]
)
@pytest.mark.parametrize("kind", ["specblock", "eagle3"])
@torch.no_grad()
def test_a_head_drafts_the_same(monkeypatch, kind, lengths, padding):
    draw = torch.Generator().manual_seed(2)
    count = len(lengths)
    text = torch.randint(0, 2048, (count, MAX_LEN), generator=draw)
    tables = (torch.randperm(39, generator=draw)[: 13 * count] + 1).view(count, -1)
    found, sizes = [], []
    for most in (10_000, 16):
        monkeypatch.setattr(network_drafter, "MAX_ROWS", most)
        head, width = head_of(kind)
        states = torch.randn(3, count, MAX_LEN, width, generator=draw.manual_seed(3))
        part_of = network_drafter.part_of
        monkeypatch.setattr(
            network_drafter,
            "part_of",
            lambda *args, f=part_of: sizes.append(args[2] - args[1]) or f(*args),
        )
        done = [0] * count
        trees = []
        for step in range(2):  # the second step reads what the first has left in the cache
            rows = [(a, a + (n if step == 0 else 2)) for a, n in zip(done, lengths)]
            head.advance(rows_of(rows, tables, states, text, PAGE, padding))
            tree = head.draft()
            assert (tree.size == 24).all(), "empty trees are equal, too"
            trees += [texts(tree, request) for request in range(count)]
            done = [end for _, end in rows]
        found.append(trees)
    whole, cut = found
    assert max(sizes, default=99) <= 16 and len(sizes) >= 2
    for mine, wanted in zip(cut, whole):
        assert len(mine.keys() & wanted.keys()) >= len(wanted) - 2, "more than ties differ"
        for path in mine.keys() & wanted.keys():
            assert mine[path] == pytest.approx(wanted[path], abs=1e-3)


@pytest.mark.parametrize("kind", ["specblock", "eagle3"])
@torch.no_grad()
def test_some_requests_draft_what_all_would(kind):
    head, width = head_of(kind)
    states, text = torch.randn(3, 3, MAX_LEN, width), torch.randint(0, 2048, (3, MAX_LEN))
    tables = torch.arange(1, 19).view(3, 6)
    head.advance(rows_of([(0, 11), (0, 6), (0, 17)], tables, states, text, PAGE))
    whole, some = head.draft(), head.draft(torch.tensor([2, 0]))
    for place, request in enumerate((2, 0)):
        assert texts(some, place) == pytest.approx(texts(whole, request), abs=1e-5)
