"""The book against plain lists, and its guards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.records import random_record

from vllm_specblock.adapt.book import Book, Record
from vllm_specblock.adapt.learning.train_batches import batches, spread

SIZE = random_record("any").size


def room_for(records: int) -> float:
    """MiB with which each of the four parts holds so many."""
    return 4 * (records * SIZE + 8) / (1 << 20)


def learned(count: int, prefix: str = "r") -> list[str]:
    """Ids of requests that may be trained on."""
    ids = (f"{prefix}{number}" for number in range(10 * count + 10))
    return [each for each in ids if not random_record(each).judged][:count]


def ids(records) -> list[str]:
    return [record.request for record in records]


def test_each_part_of_the_book_keeps_to_its_room():
    """New and recent records are the newest ones; old ones are a sample of what left them."""
    book, records = Book(room_for(3)), [random_record(f"request {number}") for number in range(60)]
    assert all(map(book.add, records)) and book.counts["recorded"] == 60
    judged = [record for record in records if record.judged]
    new = [record for record in records if not record.judged]
    assert book.new == new[-3:] and book.recent.records == judged[-3:]
    for part, left in ((book.reservoir, new[:-3]), (book.old, judged[:-3])):
        assert len(part.records) == 3 and all(record in left for record in part.records)
    parts = (*book.new, *book.recent.records, *book.reservoir.records, *book.old.records)
    assert sum(record.size for record in parts) <= room_for(3) * (1 << 20)
    assert book.take(2) == new[-3:-1] and book.new == new[-1:]


def test_judged_requests_are_one_in_five_and_never_learned_from():
    book = Book(room_for(1000))
    records = [random_record(f"request {number}") for number in range(600)]
    for record in records:
        book.add(record)
    judged = {record.request for record in records if record.judged}
    assert 80 < len(judged) < 160
    taken = {each.request for batch in batches(book, 600) for each in batch}
    assert taken and not taken & judged
    assert set(ids(book.recent.records)) == judged
    assert not {record.request for record in book.reservoir.records} & judged


def test_the_reservoir_is_a_uniform_sample():
    counts: Counter[str] = Counter()
    names = learned(20)
    for seed in range(400):
        book = Book(room_for(5), seed=seed)
        for name in names:
            book.add(random_record(name))
            book.take(1)
        counts.update(ids(book.reservoir.records))
    # 100 times each, with a standard deviation of 8.7.
    assert all(60 < counts[name] < 140 for name in names)


def test_an_update_learns_from_the_newest_requests_and_rehearses_those_before():
    """Behind a rest an update would learn from texts of a domain that is gone."""
    book, names = Book(room_for(30)), learned(12)
    for name in (*names, names[2], names[-1]):
        book.add(random_record(name))
    new = [each for each, _ in batches(book, 2)]  # the third request is among the newest again
    assert ids(new) == [names[2], names[-1]]
    assert ids(book.new) == [names[2], names[-1]]  # a second record of each
    assert sorted(ids(book.reservoir.records)) == sorted(names)


def test_a_batch_is_half_new_and_half_rehearsed():
    book = Book(room_for(100))
    for name in learned(8, "old"):
        book.add(random_record(name))
    assert [len(batch) for batch in batches(book, 8)] == [1] * 8  # nothing to rehearse yet
    names = learned(6, "new")
    for name in names:
        book.add(random_record(name))
    found = batches(book, 6)
    assert [new.request for new, _ in found] == names
    assert all(old.request.startswith("old") for _, old in found)
    assert not batches(book, 6)


def known(name: str, tau: int) -> Record:
    return replace(random_record(name), tau=tau)


def test_records_are_drawn_by_their_weight():
    """Four hard ones, of weight 1, and four easy ones, of 1 / 9."""
    records = [known(name, tau) for name, tau in zip(learned(8), (1, 3) * 4)]
    counts: Counter[str] = Counter()
    for number in range(90):
        drawn = spread(records, (number + 0.5) / 90)
        assert len(drawn) == 8 and drawn == sorted(drawn, key=records.index)
        assert all(drawn.count(each) in (1, 2) for each in records[::2])
        assert all(drawn.count(each) in (0, 1) for each in records[1::2])
        counts.update(ids(drawn))
    assert [counts[each.request] for each in records] == [162, 18] * 4
    assert spread(records[::2], 0.3) == records[::2], "alike: each once"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["states", "last"])
def test_numbers_that_are_not_finite_are_dropped_and_counted(part, value):
    book, record = Book(), random_record("broken")
    getattr(record, part)[3, 5] = value
    assert not book.add(record)
    assert book.counts == {"not finite": 1} and not book.new


def test_loops_are_dropped_and_counted():
    book, record = Book(), random_record("loop", rows=40)
    assert not book.add(replace(record, tokens=torch.arange(40) % 3))
    assert book.add(replace(record, tokens=torch.arange(40) % 4))  # just 1 in 10
    assert book.counts == {"loop": 1, "recorded": 1}
