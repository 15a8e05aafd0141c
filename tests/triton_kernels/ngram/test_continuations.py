"""The n-gram drafter's two launches find and follow what the loop for CPUs does."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal
from support.trees import texts
from vllm_specblock.triton_kernels.ngram.occurrences import Texts

from vllm_specblock.drafters.ngram.drafter import NGramDrafter
from vllm_specblock.drafters.options import NGramConfig
from vllm_specblock.tree import DraftTree

SLOTS = 5
STEP = 1 / 1024  # of scores, which logarithms of another kind may round the other way


def table_of(lengths: list[int], vocab: int, width: int, device, earlier: int = 0) -> Texts:
    """Random texts in scattered rows of a wider table that is full of them; earlier ones."""
    draw = torch.Generator().manual_seed(width + vocab)
    table = torch.randint(vocab, (SLOTS, width + 7), generator=draw, dtype=torch.int32)
    count = len(lengths)
    known = torch.zeros(count, 3, dtype=torch.int64)
    known[:, 0] = torch.randperm(SLOTS, generator=draw)[:count]
    known[:, 1] = 2 * torch.arange(count)
    position = torch.full((2 * count, 2), 3)
    position[::2, 0] = torch.tensor(lengths) - 2
    before = torch.randint(-1, vocab, (earlier,), generator=draw, dtype=torch.int32)
    table, known, position, before = (x.to(device) for x in (table, known, position, before))
    return Texts(table[:, :width], known[:, 0], position[:, 0], known[:, 1], before)


def head_on(known: Texts, options: NGramConfig, nodes: int) -> NGramDrafter:
    head = NGramDrafter(options, nodes, known.width)
    head.texts = Texts(*(x.cpu() for x in known))
    return head


def launched(kernels, known: Texts, head: NGramDrafter) -> DraftTree:
    follow = kernels.load("continuations").follow_triton
    made = follow(known, head.following)
    return DraftTree(*(getattr(made, name).cpu() for name in DraftTree.TENSORS))


CASES = [
    (NGramConfig(), 3, 130),
    (NGramConfig(depth=5, branches=4), 40, 200),
    (NGramConfig(min_match=2, max_match=5, depth=7, branches=3), 4, 37),
    (NGramConfig(min_match=1, max_match=1, depth=1, branches=1), 2, 130),
    (NGramConfig(max_match=32, depth=3, branches=32), 1, 37),
    (NGramConfig(min_match=32, max_match=32, depth=4), 1, 37),
    (NGramConfig(depth=4, branches=2), 2, 1),
]


@pytest.mark.parametrize(
    ("options", "vocab", "width", "earlier"),
    [*((*of, 1030) for of in CASES), *((*of, earlier) for of in CASES[::3] for earlier in (0, 1))],
    ids=str,
)
def test_as_the_loop(kernels, options, vocab, width, earlier):
    """Everything that is drafted at all: a budget would cut where scores are all but equal."""
    lengths = [width, max(1, width // 2), 1, min(2, width), max(1, width - 5)]
    known = table_of(lengths, vocab, width, kernels.device, earlier)
    head = head_on(known, options, min(256, options.branches * options.depth))
    wanted, made = head.draft(), launched(kernels, known, head)
    for name in DraftTree.TENSORS:
        assert getattr(made, name).dtype == getattr(wanted, name).dtype, name
    for request in range(len(lengths)):
        said = texts(wanted, request)
        assert texts(made, request) == pytest.approx(said, abs=STEP * options.depth)
    again = DraftTree.from_nodes(made.token, made.parent, made.logprob, made.size)
    assert_equal(made, again)
    assert (made.logprob[:, 1:] <= made.logprob[:, :-1]).all()
    assert wanted.size[0] > 0 or width == 1, "nothing was drafted"
    assert wanted.size[2] > 0 or earlier < 2 or options.min_match > 1, "a text of one token"


@pytest.mark.parametrize("length", [1025, 1026, 2048, 3000])
def test_many_stretches(kernels, length):
    """A text of several programs: matches across their edges, and a stretch without any."""
    known = table_of([length], 2000, 3000, kernels.device, 500)
    table = known.table[known.row[0]]
    motif = torch.arange(5000, 5012, dtype=torch.int32, device=table.device)
    for end in (10, 700, 1030, length):  # only its beginning, where the table's rows begin
        table[max(0, end - 12) : end] = motif[max(0, 12 - end) :]
    head = head_on(known, NGramConfig(branches=3, depth=6), 18)
    wanted, made = head.draft(), launched(kernels, known, head)
    assert wanted.size[0] > 6, "all occurrences say the same"
    assert texts(made, 0) == pytest.approx(texts(wanted, 0), abs=6 * STEP)


@pytest.mark.parametrize("position", [-9, -2, -1, 400, 1 << 40])
def test_padding_texts_are_safe(kernels, position):
    known = table_of([40], 2, 40, kernels.device)
    known = known._replace(position=torch.full_like(known.position, position))
    head = head_on(known, NGramConfig(depth=4), 20)
    made = launched(kernels, known, head)
    size = int(made.size[0])
    assert position > 0 or size == 0
    assert ((made.token >= 0) & (made.token < 2)).all() and (made.parent[0, size:] == -1).all()
    none = known._replace(row=known.row[:0], last=known.last[:0])
    assert launched(kernels, none, head).token.shape == (0, 20)
