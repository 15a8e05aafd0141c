"""The head over paged caches drafts what the plain description in `dense_cache.py` drafts."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.committed import rows_of
from support.dense_cache import DenseCache
from support.records import small_drafter
from support.trees import texts

from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.growth import Expansion
from vllm_specblock.drafters.specblock.model import SpecBlockModel

H, V, K, PAGE, MAX_LEN = 32, 64, 4, 8, 64


def make_drafter(**changes) -> SpecBlockModel:
    drafter = small_drafter(0, vocab=V, **changes).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.25)
    return drafter


def make_head(
    drafter, options: SpecBlockConfig, nodes: int
) -> tuple[SpecBlockDrafter, torch.Tensor]:
    embedding = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    head = SpecBlockDrafter(drafter, lambda ids: embedding[ids], options, nodes, MAX_LEN)
    # Noise in the cache: nothing of it may be seen.
    caches = [
        torch.randn(20, PAGE * K, 2, 16).transpose(1, 2) for _ in range(2)
    ]  # [blocks, heads, entries, 2D], entries consecutive in memory
    head.bind(caches)
    return head, embedding


def dense_tree(drafter, embedding, features, text, end: int, head: SpecBlockDrafter, beta):
    """The same tree from the dense description, for one request whose root is text[end]."""
    cache, shape = DenseCache(drafter.config), head.shape
    row = torch.arange(end)
    newest = torch.tensor([end - 1])
    hidden = drafter(
        drafter.condition(features[row]),
        embedding[text[row + 1]],
        row + 1,
        cache.append(newest),
        newest,
    )
    expansion = Expansion(shape, torch.tensor(shape.branching), 1)
    grown = expansion.attach(None, *drafter.candidates(hidden[None], shape.width, beta))
    growth, drafted = cache.grow(), hidden
    depth = torch.zeros(1, dtype=torch.int64)
    for _ in range(2, shape.num_blocks + 1):
        position, row = grown.position[0], grown.row[0]
        base = torch.full_like(position, end)
        if drafter.config.block_rope == "path":
            base = base + depth[row] + position + 1
        depth = torch.cat([depth, depth[row] + position + 1])
        attend = growth.starts(row, position)
        later = drafter(drafted[row, position], embedding[grown.token[0]], base, attend)
        grown = expansion.attach(grown, *drafter.candidates(later[None], shape.width, beta))
        drafted = torch.cat([drafted, later])
    return grown


@pytest.mark.parametrize(
    ("options", "drafter_changes"),
    [
        ({"num_blocks": 1}, {}),
        ({}, {}),
        ({"calibrate_drafts": False}, {}),
        ({"num_starts": 3, "branching": [2, 4, 10, 0]}, {}),
        ({}, {"block_rope": "path"}),
        ({}, {"qk_norm": True}),
        # Each block starts from the end of the one before: three rows on one path.
        ({"num_blocks": 3, "num_starts": 1}, {}),
        # Starts of the third block lie in rows of both blocks before it.
        ({"num_blocks": 3}, {}),
        ({"num_blocks": 4, "num_starts": 5}, {"block_rope": "path"}),
    ],
)
@torch.no_grad()
def test_paged_equals_dense(options, drafter_changes):
    """Two requests, prompt in two chunks, then two decode steps with rejected nodes as padding."""
    drafter = make_drafter(**drafter_changes)
    head, embedding = make_head(drafter, SpecBlockConfig(**options), nodes=40)
    head.beta = None if head.calibration is None else torch.tensor([1.3, 0.7])
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(3, 2, MAX_LEN, H, generator=draw)
    features = states.permute(1, 2, 0, 3).flatten(2)  # [R, n, 3H], low, mid, high
    text = torch.randint(0, V, (2, MAX_LEN + 1), generator=draw)
    tables = torch.tensor([[3, 7, 1, 12, 5, 6, 9, 10], [4, 2, 8, 11, 13, 14, 15, 16]])
    for requests, padding in (
        ([(0, 11), (0, 6)], 0),
        ([(11, 20), (6, 9)], 0),
        ([(20, 23), (9, 10)], 4),
        ([(23, 24), (10, 14)], 8),
    ):
        head.advance(rows_of(requests, tables, states, text, PAGE, padding))
        tree = head.draft()
        for request, (_, end) in enumerate(requests):
            beta = None if head.beta is None else head.beta[request : request + 1]
            expected = dense_tree(
                drafter, embedding, features[request], text[request], end, head, beta
            )
            found, wanted = texts(tree, request), texts(expected, 0)
            common = found.keys() & wanted.keys()
            assert len(common) >= len(wanted) - 2, "more than a tie at the budget's cut differs"
            for path in common:
                assert found[path] == pytest.approx(wanted[path], abs=1e-3)


@torch.no_grad()
def test_at_the_length_limit_later_blocks_are_left_out():
    """Their rows would have no slot; block 1 goes on alone."""
    drafter = make_drafter()
    head, _ = make_head(drafter, SpecBlockConfig(), nodes=40)
    states, text = torch.randn(3, 1, MAX_LEN, H), torch.randint(0, V, (1, MAX_LEN + 1))
    tables = torch.arange(1, 9)[None]
    before = [cache.clone() for cache in head.attention_builder.caches]
    head.advance(rows_of([(0, MAX_LEN)], tables, states, text, PAGE))
    tree = head.draft()
    assert max(len(path) for path in texts(tree, 0)) == K
    for cache, old in zip(head.attention_builder.caches, before):
        changed = (cache != old).any(-1).any(1).any(-1).nonzero().flatten().tolist()
        assert set(changed) <= {0, *tables[0].tolist()}, "a stranger's block was written"


@torch.no_grad()
def test_a_head_does_not_keep_what_the_target_left():
    """Of a long prompt that is hundreds of megabytes, until a step that is not a graph's."""
    head, _ = make_head(make_drafter(), SpecBlockConfig(), nodes=40)
    states, text = torch.randn(3, 1, MAX_LEN, H), torch.randint(0, V, (1, MAX_LEN + 1))
    rows = rows_of([(0, 20)], torch.arange(1, 9)[None], states, text, PAGE)
    left = [weakref.ref(state) for state in rows.states]
    head.advance(rows)
    head.draft()
    del rows, states
    assert all(state() is None for state in left)
