"""The n-gram head drafts what a slow reading of the text drafts, and sees nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.committed import rows_of, zero_rows
from support.tensors import assert_equal
from support.trees import prefix, texts

from vllm_specblock.drafters.ngram.drafter import POWER, VOTE, NGramDrafter
from vllm_specblock.drafters.options import NGramConfig
from vllm_specblock.tree import DraftTree

from ..test_growth import assert_valid

LONGEST, SLOTS = 48, 6
ROUNDING = 1 / 64
"""Nats that whole votes and rounded scores may make on a path of a few tokens."""


def plain_draft(
    text: list[int], options: NGramConfig, depth: int, earlier: list[int]
) -> dict[tuple, float]:
    """Every drafted path and its score in nats, by reading the texts over and over."""

    def match(said: list[int], place: int) -> int:
        count = 0
        while count < min(options.max_match, place + 1, len(text)):
            if said[place - count] != text[-1 - count]:
                break
            count += 1
        return count

    found = [(match(earlier, place), 0, place) for place in range(len(earlier))]
    found += [(match(text, place), 1, place) for place in range(len(text) - 1)]
    found = sorted((each for each in found if each[0] >= options.min_match), reverse=True)
    said = []
    for rank, (matched, own, place) in enumerate(found[: options.branches], 1):
        # Copied one by one, the copy may reach into itself: a period goes on for ever.
        grown = list(text)
        for i in range(depth):
            source = grown if own else [*earlier, -1]
            if source[place + 1 + i] < 0:
                break
            grown.append(source[place + 1 + i])
        said.append((rank, matched, tuple(grown[len(text) :])))

    scores = {(): 0.0}
    for length in range(1, depth + 1):
        for path in {path[:length] for _, _, path in said if len(path) >= length}:

            def votes(prefix: tuple, length: int = length) -> float:
                return sum(
                    VOTE * (matched + length - 1) ** POWER / rank**0.25
                    for rank, matched, other in said
                    if other[: len(prefix)] == prefix and len(other) >= length
                )

            trust = votes(path) / (votes(path) + 1)
            share = votes(path) / votes(path[:-1])
            scores[path] = scores[path[:-1]] + math.log(share * trust)
    del scores[()]
    return scores


def finish(head: NGramDrafter, answer: list[int], prompt: int = 3) -> None:
    """Let a request end whose text goes on in its slot."""
    text = torch.tensor([7] * prompt + answer + [9] * 4, dtype=torch.int32)
    head.finish(text, prompt, torch.tensor(prompt + len(answer)))


def advanced(
    batch: list[list[int]], options: NGramConfig, nodes: int, stale=None, ended=()
) -> NGramDrafter:
    """A head that took in one step of several requests; their texts lie in scattered slots.

    Args:
        stale: [SLOTS, LONGEST] int64, what the slots held before.
        ended: answers of earlier requests.
    """
    head = NGramDrafter(options, nodes, LONGEST)
    for answer in ended:
        finish(head, answer)
    tables = torch.arange(len(batch) * 8).view(len(batch), 8)
    padded = torch.zeros(len(batch), LONGEST, dtype=torch.int64)
    for row, text in enumerate(batch):
        padded[row, : len(text)] = torch.tensor(text)
    # Requests bring one row, or their whole prompt; four rows of rejected nodes come after.
    steps = [(0 if row % 2 else len(text) - 2, len(text) - 1) for row, text in enumerate(batch)]
    rows = rows_of(steps, tables, torch.zeros(3, len(batch), LONGEST, 1), padded, 8, padding=4)
    req_idx = torch.tensor([4, 0, 5, 2][: len(batch)])
    held = torch.zeros(SLOTS, LONGEST, dtype=torch.int64) if stale is None else stale.clone()
    for row, text in enumerate(batch):
        held[req_idx[row], : len(text)] = torch.tensor(text)
    head.advance(replace(rows, text=held.int(), req_idx=req_idx))
    return head


def check_invariants(tree: DraftTree, vocab: int, depth: int) -> None:
    assert_valid(tree, vocab, depth)
    scores = 1024 * tree.logprob[tree.logprob.isfinite()]
    assert torch.equal(scores, scores.round()), "sums are not exact"


@st.composite
def situations(draw):
    vocab = draw(st.integers(1, 4))
    text = st.lists(st.integers(0, vocab - 1), min_size=2, max_size=36)
    least = draw(st.integers(1, 3))
    options = NGramConfig(
        min_match=least,
        max_match=draw(st.integers(least, 6)),
        depth=draw(st.integers(1, 9)),
        branches=draw(st.integers(1, 7)),
        earlier_tokens=draw(st.integers(0, 60)),
    )
    seed = draw(st.integers(0, 9))
    stale = torch.randint(vocab, (SLOTS, LONGEST), generator=torch.Generator().manual_seed(seed))
    batch, ended = (draw(st.lists(text, min_size=least, max_size=4)) for least in (1, 0))
    return batch, options, stale, ended


@settings(max_examples=150, deadline=None)
@given(situations())
def test_drafts_what_a_slow_reading_drafts(situation):
    """Also: other requests' lengths, places and leftovers in a slot make no difference."""
    batch, options, stale, ended = situation
    nodes = options.branches * options.depth
    head = advanced(batch, options, nodes, stale, ended)
    tree, earlier = head.draft(), head.earlier.tolist()
    check_invariants(tree, 4, options.depth)
    for request, text in enumerate(batch):
        expected = plain_draft(text, options, min(options.depth, nodes), earlier)
        assert texts(tree, request) == pytest.approx(expected, abs=ROUNDING)


@settings(max_examples=40, deadline=None)
@given(situations(), st.integers(1, 12))
def test_a_smaller_budget_is_a_cut(situation, nodes):
    whole = advanced(situation[0], situation[1], 64, *situation[2:]).draft()
    cut = advanced(situation[0], situation[1], nodes, *situation[2:]).draft()
    assert_equal(cut, prefix(whole, nodes))


@given(st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=6), st.integers(1, 40))
def test_the_newest_answers_are_kept(answers, room):
    """Of an answer longer than the ring, the end."""
    head = NGramDrafter(NGramConfig(earlier_tokens=room), 20, LONGEST)
    said = [-1] * room
    for answer in answers:
        finish(head, answer)
        said += [*answer, -1][-room:]
    assert head.earlier.tolist() == said[-room:]
    head.forget()
    assert (head.earlier == -1).all()


@pytest.mark.parametrize("position", [-2, -1, LONGEST + 30])
def test_rows_that_stand_for_nothing_are_safe(position):
    """Dummy batches bring positions that belong to no text."""
    rows = replace(zero_rows(8, 1, max_len=LONGEST), position=torch.full((12,), position))
    head = NGramDrafter(NGramConfig(), 20, LONGEST)
    head.advance(rows)
    check_invariants(head.draft(), 1, 16)


def test_the_deepest_widest_tree_stays_a_tree():
    """Sums over the most votes and the longest paths are still exact."""
    draw = torch.Generator().manual_seed(1)
    batch = [torch.randint(2, (LONGEST,), generator=draw).tolist() for _ in range(4)]
    options = NGramConfig(min_match=1, max_match=32, depth=63, branches=32)
    check_invariants(advanced(batch, options, 256).draft(), 2, 63)
