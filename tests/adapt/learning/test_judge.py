"""The judged depth, paired and computed once, and when a version is better by more than chance."""

from __future__ import annotations

import math

import pytest
from support.records import random_record, small_drafter, small_teacher

from vllm_specblock.adapt.book import Book
from vllm_specblock.adapt.learning.judge import Judge, is_sure
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy.actions import held
from vllm_specblock.adapt.policy.interface import Action


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


def test_without_judged_records_nothing_is_said():
    one, other = versions()
    judge = Judge(small_drafter(), small_teacher(), 2)
    assert math.isnan(judge.difference(one, other, Book()))
    assert math.isnan(judge.depth(one, random_record("r", rows=5, prompt=4)))
