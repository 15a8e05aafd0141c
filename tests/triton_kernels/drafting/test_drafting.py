"""Trees grow, are selected and described block by block in one launch each, as by torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.drafted_blocks import coarse_block, few_examples, random_block
from support.tensors import assert_equal, column, on, wide
from vllm_specblock.triton_kernels.drafting.expand import NextStarts, TreeShape
from vllm_specblock.triton_kernels.drafting.first_block_metadata import first_block_metadata
from vllm_specblock.triton_kernels.drafting.later_block_metadata import (
    CommittedRows,
    DraftedRows,
    later_block_metadata,
)
from vllm_specblock.triton_kernels.tree.candidate_keys import (
    CLOSED,
    DEPTH_ONE,
    ROOT_HASH,
    extend_hash,
    rank_key,
)
from vllm_specblock.triton_kernels.tree.select_tree import Candidates

from vllm_specblock.candidates import NEVER, select
from vllm_specblock.drafters.common.draft_attention import DraftAttentionBuilder
from vllm_specblock.drafters.specblock.growth import Expansion


def scattered(requests: int, count: int, vocab: int, seed: int) -> tuple[Candidates, int]:
    """Candidates under random parents, on a grid of scores: ties, twins and unwanted ones."""
    draw = torch.Generator().manual_seed(seed)
    each = torch.arange(requests)
    token = torch.randint(0, vocab, (requests, count), generator=draw)
    parent, depth = torch.zeros(2, requests, count, dtype=torch.int64)
    score = torch.zeros(requests, count)
    path_hash = torch.full((requests, count), ROOT_HASH)
    for c in range(1, count):
        up = parent[:, c] = torch.randint(0, c, (requests,), generator=draw)
        depth[:, c] = depth[each, up] + 1
        score[:, c] = score[each, up] - torch.randint(0, 6, (requests,), generator=draw) / 8
        score[torch.rand(requests, generator=draw) < 0.1, c] = NEVER
        path_hash[:, c] = extend_hash(path_hash[each, up], token[:, c])
    key = rank_key(score, depth * DEPTH_ONE + torch.arange(count))
    key[:, 0] = 0
    return Candidates(token, parent, score, key, path_hash), int(depth.max())


def certain_block(*args):
    """Certain tokens' log-probabilities rounded above 0."""
    top, *rest = coarse_block(*args)
    return torch.where(top == 0, 1e-6, top), *rest


@few_examples(8)
@given(st.integers(1, 140), st.integers(1, 4), st.integers(1, 130), st.integers(0, 10**6))
def test_select_equals_torch(kernels, count, vocab, budget, seed):
    fields, depth = scattered(2, count, vocab, seed)
    launch = kernels.load("select_tree").select_triton
    for joins in (True, False):
        chosen = fields if joins else fields._replace(path_hash=None)
        wanted, node = select.reference(chosen, budget, max(1, depth))
        got = launch(on(kernels.device, chosen), budget, max(1, depth))
        assert_equal(got, wanted)
        live = fields.key < CLOSED
        assert torch.equal(got.node.cpu()[live], node[live])


@pytest.mark.parametrize(
    ("requests", "count", "budget"),
    [(1, 577, 60), (3, 40, 12), (0, 40, 12)],
    ids=["serving size", "several", "none"],
)
def test_select_takes_views_of_wider_rows(kernels, requests, count, budget):
    fields, depth = scattered(3, count, 3, 2)
    fields = Candidates._make(x[:requests] for x in fields)
    wanted, _ = select.reference(fields, budget, depth)
    assert requests != 1 or wanted.size[0] == budget
    views = on(kernels.device, Candidates._make(wide(x, other=1) for x in fields))
    launch = kernels.load("select_tree").select_triton
    assert_equal(launch(views, budget, depth), wanted)


def test_select_tells_siblings_apart_by_their_low_bits(kernels):
    """Hashes of neighbouring tokens differ in bits that a sort with ranks has no room for."""
    count = 200
    token = torch.arange(count)[None]
    score = -torch.arange(count)[None] / 64.0
    key = rank_key(score, torch.arange(count) + DEPTH_ONE)
    key[:, 0] = 0
    path_hash = extend_hash(torch.tensor(ROOT_HASH), token)
    fields = Candidates(token, torch.zeros_like(token), score, key, path_hash)
    launch = kernels.load("select_tree").select_triton
    assert launch(on(kernels.device, fields), 256, 1).size.tolist() == [count - 1]


SHAPES = st.builds(
    TreeShape,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([(2, 4, 6, 0), (1, 1, 1, 1), (3, 0, 0, 0)]),
    st.integers(1, 70),
)
LEVELS = st.tuples(st.integers(1, 8), st.integers(1, 10), st.integers(1, 10), st.integers(1, 70))
LEVELS = LEVELS.map(lambda d: TreeShape.levels(d[0], d[1], min(d[1], d[2]), d[3]))


@few_examples(10)
@given(
    st.one_of(SHAPES, LEVELS),
    st.sampled_from([random_block, certain_block]),
    st.integers(0, 3),
    st.integers(0, 10**6),
)
@example(TreeShape(3, 3, 5, (2, 4, 6, 4), 60), random_block, 2, 2)  # twins that are both open
@example(TreeShape(3, 3, 5, (2, 4, 6, 0), 60), random_block, 2, 3)
@example(TreeShape.levels(1, 1, 1, 5), random_block, 2, 0)
@example(TreeShape.levels(8, 1, 1, 8), random_block, 3, 1)
@example(TreeShape.levels(3, 10, 2, 60), certain_block, 3, 2)  # fewer rows than children
def test_growth_equals_torch(kernels, shape, make, requests, seed):
    draw, device = torch.Generator().manual_seed(seed), kernels.device
    given = 2 if shape.by_level else 3  # levels have no buckets
    kernel = kernels.load("expand")
    branching = torch.tensor(shape.branching)
    plain = Expansion(shape, branching, requests)
    fused = kernel.Growing(shape, branching.to(device), requests)
    block = make(draw, shape, 11, requests, 1)[:given]
    wanted = plain.attach(None, *block)
    got = fused.attach(None, *(x.to(device) for x in block))
    for m in range(2, shape.num_blocks + 1):
        assert torch.equal(got.valid.cpu(), wanted.valid)
        for name in ("node", "token", "row", "position"):
            mine, theirs = getattr(got, name).cpu(), getattr(wanted, name)
            assert torch.equal(mine[wanted.valid], theirs[wanted.valid]), name
        # A caller reads hidden states at all of them, valid or not.
        first = shape.rows(m - 2) if shape.by_level else 0
        assert (got.row >= first).all() and (got.row < shape.rows(m - 1)).all()
        assert (got.position >= 0).all() and (got.position < shape.block_size).all()
        no_room = torch.rand(wanted.valid.shape, generator=draw) < 0.2
        wanted.valid[no_room] = False
        got.valid[no_room.to(device)] = False
        block = make(draw, shape, 11, requests, shape.num_starts)[:given]
        wanted = plain.attach(wanted, *block)
        got = fused.attach(got, *(x.to(device) for x in block))
    assert_equal(got, wanted)


# ---- What the rows of each block see ----
MAX, TOKENS, BLOCKS = 203, 8, 4  # the length limit, tokens of a cache block, M


def some_rows(requests: int) -> SimpleNamespace:
    """Requests of 1 to 9 rows, with padding behind some newest rows, up to the length limit."""
    lengths = torch.randint(1, 10, (requests,))
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    last = torch.rand(requests).mul(lengths).long()
    newest = torch.randint(9, MAX - 40, (requests,))
    newest[requests // 2 :] = MAX - 1 - torch.arange(requests - requests // 2) % 9
    request = torch.arange(requests).repeat_interleave(lengths)
    local = torch.arange(len(request)) - row_start[request]
    position = newest[request] - last[request] + local
    kv_slot = torch.randint(0, 1 << 40, position.shape)
    kv_slot[local > last[request]] = -1
    return SimpleNamespace(
        position=column(position),
        index=column(position - TOKENS * (request % 2)),
        kv_slot=column(kv_slot),
        row_start=column(row_start.int()),
        last=column(row_start[:-1] + last),
    )


def some_starts(requests: int, starts: int, size: int, block: int) -> NextStarts:
    """Anywhere in the rows so far; the drafting row is among them."""
    shape = (starts, requests)
    row = torch.randint(0, 1 + (block - 2) * starts, shape)
    row[torch.rand(shape) < 0.2] = 0
    position = torch.randint(0, size, shape)
    valid = torch.rand(shape) > 0.2
    return NextStarts._make(x.t() for x in (row, row, row, position, valid))


@pytest.mark.parametrize(
    ("requests", "size", "starts"), [(1, 4, 8), (20, 1, 8), (20, 3, 3), (20, 4, 1), (130, 2, 2)]
)
@pytest.mark.parametrize("path_rope", [True, False])
def test_metadata_equals_torch(kernels, monkeypatch, requests, size, starts, path_rope):
    first, later = kernels.load("first_block_metadata"), kernels.load("later_block_metadata")
    empty = torch.empty  # what is launched begins as garbage
    monkeypatch.setattr(later.torch, "empty", lambda *s, **options: empty(*s, **options).fill_(99))
    # A table that ends before the length limit: behind it, its last block is read.
    width = -(-MAX // TOKENS) if path_rope else 12
    torch.manual_seed(requests + 10 * size + starts)
    rows, device = some_rows(requests), kernels.device
    there = SimpleNamespace(**on(device, vars(rows)))
    found = first.first_block_metadata_triton(there, size)
    assert_equal(tuple(found), tuple(first_block_metadata.reference(rows, size)))

    shape = TreeShape(size, BLOCKS, starts, (1, 1, 1, 1), 1)
    builder = DraftAttentionBuilder([torch.empty(0)], shape, MAX, path_rope)
    # Twice as wide as what is used of it.
    table = torch.randint(0, 1 << 30, (requests, 2 * width), dtype=torch.int32)[:, :width]
    committed = CommittedRows(rows.position, rows.index, rows.last, table)
    drafted_rows, _, words = builder.own.shape
    kept = DraftedRows(
        builder.own,
        torch.full((requests, drafted_rows), 1 << 60),
        torch.full((requests, drafted_rows, words), 1 << 60),
        torch.full((requests, drafted_rows), 1 << 60) if path_rope else None,
    )
    there, everywhere, nowhere = on(device, kept), 0, 0
    for block in range(2, BLOCKS + 1):
        where = some_starts(requests, starts, size, block)
        limits = block, TOKENS, MAX, path_rope and size == 1  # as EAGLE-2's levels are
        given = *on(device, (where, committed)), there
        found = later.later_block_metadata_triton(*given, *limits)
        wanted = later_block_metadata.reference(where, committed, kept, *limits)
        assert_equal(tuple(found), tuple(wanted))
        assert_equal(*([x for x in each if x is not None] for each in (there, kept)))
        assert not (wanted.valid & ~where.valid).any()
        everywhere += int(wanted.valid.sum())
        nowhere += int((where.valid & ~wanted.valid).sum())
    assert requests < 20 or (nowhere and everywhere), "the length limit was not met"
