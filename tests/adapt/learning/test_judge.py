"""The judged depth against a plain count, and that it is paired and computed once."""

from __future__ import annotations

import math

import pytest
import torch
from support.records import random_record, small_drafter, small_teacher

from vllm_specblock.adapt.book import Book
from vllm_specblock.adapt.learning.judge import Judge, depth_along, is_sure
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy.actions import held
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.train.eval.dense_cache import DenseCache
from vllm_specblock.train.losses import RANK_BUCKETS


@torch.no_grad()
def counted_depth(drafter, sequence) -> float:
    """Row by row, from a fresh cache each."""
    K, depths = drafter.config.block_size, []
    for root in range(sequence.prompt, len(sequence.tokens) - 1):
        cache = DenseCache(drafter.config)
        rows = torch.arange(root)
        hidden = drafter(
            drafter.condition(sequence.hidden[rows]),
            sequence.embed(sequence.tokens[rows + 1]),
            rows + 1,
            cache.append(),
        )[-1:]
        states = [hidden]
        if root + K < len(sequence.tokens):
            start = torch.tensor([root + K])
            states.append(
                drafter(
                    hidden[:, -1],
                    sequence.embed(sequence.tokens[start]),
                    torch.tensor([root]),
                    cache.grow().starts(torch.tensor([0]), torch.tensor([K - 1])),
                )
            )
        depth = 0
        for k, state in enumerate(torch.cat(states, 1)[0]):
            place = root + 1 + k
            if place >= len(sequence.tokens):
                break
            ranked = drafter.target_ids(drafter.heads(state)[0].argsort(descending=True)).tolist()
            token = int(sequence.tokens[place])
            rank = ranked.index(token) + 1 if token in ranked else math.inf
            depth += rank <= RANK_BUCKETS[1]
            if rank > 1:
                break
        depths.append(depth)
    return sum(depths) / len(depths)


def test_depth_is_the_plain_count():
    drafter, teacher = small_drafter(), small_teacher()
    found = []
    for seed in range(6):
        sequence = teacher.sequence(random_record("r", rows=24, prompt=5, seed=seed))
        found.append(depth_along(drafter, sequence, 2))
        assert found[-1] == pytest.approx(counted_depth(drafter, sequence))
    assert len(set(found)) > 3 and max(found) > 0.2


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
    # Parts weigh the same whatever they hold.
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
    monkeypatch.setattr(
        "vllm_specblock.adapt.learning.judge.depth_along",
        lambda *given: calls.append(1) or real(*given),
    )
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
