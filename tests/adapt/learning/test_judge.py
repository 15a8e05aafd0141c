"""The judged depth, paired and computed once, and when a version is better by more than chance."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.records import random_record, small_drafter, small_teacher

from vllm_specblock.adapt.book import Book
from vllm_specblock.adapt.learning import judge as judge_module
from vllm_specblock.adapt.learning.judge import Judge, depth_along, is_sure
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy.actions import held
from vllm_specblock.adapt.policy.interface import Action


def test_depth_counts_the_chain_and_a_sibling_where_the_text_leaves_it(monkeypatch):
    rows = [  # of each position: on the chain, followed, bucket of the token's rank
        [(1, 1, 0), (1, 1, 0), (1, 0, 1), (0, 0, 1)],  # two, then a sibling
        [(1, 0, 2), (0, 0, 0), (0, 1, 0), (0, 0, 0)],
        [(1, 1, 0), (1, 1, 0), (1, 1, 0), (1, 1, 0)],
        [(1, 1, 0), (1, 0, 2), (0, 0, 1), (0, 0, 0)],
    ]
    on_chain, hit, rank = torch.tensor(rows).unbind(-1)
    chain = SimpleNamespace(on_chain=on_chain.bool(), hit=hit.bool(), rank=rank)
    monkeypatch.setattr(judge_module, "chain_along", lambda *_: chain)
    sequence = small_teacher().sequence(random_record("r"))
    assert depth_along(small_drafter(), sequence, 2) == (3 + 0 + 4 + 1) / 4


def versions() -> tuple[Version, Version]:
    return tuple(
        Version(number, held(small_drafter(seed), Action.FULL))
        for number, seed in enumerate((3, 4))
    )


def book_of(names: range, room: float = 512) -> Book:
    book = Book(room)
    for number in names:
        book.add(random_record(f"request {number}", seed=number))
    return book


def test_old_and_recent_weigh_the_same():
    record = random_record("any")
    book, (one, other) = book_of(range(80), 4 * (4 * record.size + 8) / 2**20), versions()
    judge = Judge(small_drafter(), small_teacher(), 2)
    means = [
        sum(judge.depth(one, each) - judge.depth(other, each) for each in part) / len(part)
        for part in (book.recent.records, book.old.records)
    ]
    assert means[0] != means[1]
    assert judge.difference(one, other, book) == pytest.approx(sum(means) / 2)


def test_better_is_by_more_than_chance():
    assert is_sure([[0.2, 0.3, 0.1, 0.2]])
    assert not is_sure([[0.2, -0.3, 0.4, -0.1]]), "0.05, with a standard error of 0.16"
    assert not is_sure([[-0.2, -0.3, -0.1]])
    assert not is_sure([]) and not is_sure([[0.5]]) and not is_sure([[0.5], [0.4]])
    assert not is_sure([[0.0, 0.0]]), "the same drafter"
    # One text takes the spread of the others, not none: √(0.01 / 3 + 0.01) / 2 is 0.058.
    others = [0.1, 0.2, 0.3]
    assert is_sure([others, [-0.08]]) and not is_sure([others, [-0.09]])
    # Parts of any size weigh the same.
    assert not is_sure([[0.1, 0.11] * 4, [-0.2, -0.21]])


def test_the_more_were_compared_the_surer_one_has_to_be(monkeypatch):
    """Of many, one is ahead by chance."""
    book, (one, other) = book_of(range(8)), versions()
    judge = Judge(small_drafter(), small_teacher(), 2)
    saved = [0.1, 0.3, -0.1, 0.3, -0.1]  # 0.1, 1.12 standard errors
    monkeypatch.setattr(judge, "_parts", lambda measure, book: [saved])
    found = [judge.is_better(one, other, book, count) for count in range(1, 20)]
    assert found == [True] + 18 * [False], "the second takes 1.19"
    saved = [0.2, 0.3, 0.1, 0.2]  # 4.9
    assert judge.is_better(one, other, book, 500) and not judge.is_better(one, other, book, 600)


def test_better_is_who_takes_fewer_steps(monkeypatch):
    """Of three texts in four it follows a fifth of a token less, of the others half a token more,
    where steps are short: a lower mean depth, and fewer steps."""
    book, (one, other) = book_of(range(80)), versions()
    judge = Judge(small_drafter(), small_teacher(), 2)
    number = {each.request: place for place, each in enumerate(book.recent.records[-8:])}
    assert len(number) == 8

    def depth(version: Version, each) -> float:
        known = number.get(each.request, 0) % 4 > 0
        noise = 0.01 * (number.get(each.request, 0) % 3)
        if version is other:
            return 3.0 if known else 0.4
        return noise + (2.8 if known else 0.9)

    monkeypatch.setattr(judge, "depth", depth)
    assert judge.difference(one, other, book) < 0
    assert judge.is_better(one, other, book) and not judge.is_better(other, one, book)


def test_a_pair_is_computed_once(monkeypatch):
    calls = []
    real = depth_along
    monkeypatch.setattr(judge_module, "depth_along", lambda *given: calls.append(1) or real(*given))
    book, (one, other) = book_of(range(40)), versions()
    judge = Judge(small_drafter(), small_teacher(), 2)
    first = judge.difference(one, other, book)
    assert calls
    count = len(calls)
    assert judge.difference(one, other, book) == first
    assert len(calls) == count


def test_without_judged_records_nothing_is_said():
    one, other = versions()
    judge = Judge(small_drafter(), small_teacher(), 2)
    assert math.isnan(judge.difference(one, other, Book()))
    assert math.isnan(judge.depth(one, random_record("r", rows=5, prompt=4)))
