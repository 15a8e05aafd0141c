"""Learning from records: the book, train batches, updates, the judge, which version serves."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from dataclasses import replace
from math import exp, nan

import pytest
import torch
from lib.simulation import record_of
from support.records import random_record, small_drafter, small_teacher

from vllm_specblock.adapt.book import Book, Record
from vllm_specblock.adapt.learning.judge import Judge, is_sure
from vllm_specblock.adapt.learning.pool import Pool, Version
from vllm_specblock.adapt.learning.train_batches import batches, spread
from vllm_specblock.adapt.learning.update import AdaptationConfig, Updater, anchor
from vllm_specblock.adapt.policy.actions import held, parameters
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.train.config import Recipe
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import EvalSequence, TrainBatch
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target.features import TargetOutputs

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


def loss_of(drafter, train_batch) -> float:
    return float(SpecBlockLearner(drafter, Recipe(rank_from=0))(train_batch).loss.detach())


def test_a_record_of_a_whole_text_has_the_loss_of_the_text():
    drafter, teacher = small_drafter(), small_teacher()
    text = random_record("a text", rows=30)
    sequence = EvalSequence(text.tokens, 7, text.states, text.last, teacher.embed)
    loss_mask = torch.arange(30)[None] >= 7
    target_outputs = TargetOutputs(sequence.hidden[None], sequence.last[None], teacher.head)
    whole = TrainBatch(
        Batch.of(sequence.tokens[None], loss_mask), target_outputs, teacher.embed, 5, seed=2
    )
    recorded = teacher.train_batch([record_of("r", sequence)], step=5, seed=2)
    assert loss_of(drafter, recorded) == pytest.approx(loss_of(drafter, whole), rel=1e-6)
    assert loss_of(drafter, recorded) > 0


def test_padding_of_a_batch_counts_nothing():
    """With one more record in the window's length, both losses are as of each alone."""
    drafter, teacher = small_drafter(), small_teacher()
    short, long = random_record("short", rows=9), random_record("longer", rows=21)
    both = SpecBlockLearner(drafter, Recipe(num_blocks=1))(teacher.train_batch([short, long], 0, 0))
    alone = [
        SpecBlockLearner(drafter, Recipe(num_blocks=1))(teacher.train_batch([each], 0, 0))
        for each in (short, long)
    ]
    assert torch.equal(both.seen, alone[0].seen + alone[1].seen)
    torch.testing.assert_close(both.ce_loss, alone[0].ce_loss + alone[1].ce_loss)


HEADS = {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}


@pytest.fixture
def train_batch():
    records = [random_record(f"{n}", rows=20, seed=n) for n in range(4)]
    return small_teacher().train_batch(records, step=0, seed=1)


def state_of(updater: Updater):
    return copy.deepcopy((updater.drafter.state_dict(), updater.optimizer.state_dict()["state"]))


def changed(before, after) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_each_action_changes_its_own_parameters(train_batch):
    updater = Updater(small_drafter())
    before = state_of(updater)[0]
    updater.update(Action.HEADS, [train_batch])
    middle = state_of(updater)[0]
    assert changed(before, middle) == HEADS == set(parameters(updater.drafter, Action.HEADS))
    updater.update(Action.FULL, [train_batch])
    assert changed(middle, state_of(updater)[0]) == set(parameters(updater.drafter, Action.FULL))


def test_no_decay_and_three_times_the_rate_for_heads(train_batch):
    """Adam's first step is the rate for any gradient, and weights do not decay."""
    for action, rate in ((Action.FULL, 1e-3), (Action.HEADS, 3e-3)):
        updater = Updater(small_drafter(), AdaptationConfig(lr=1e-3))
        before = updater.drafter.lm_head.weight.detach().clone()
        updater.update(action, [train_batch])
        moved = (updater.drafter.lm_head.weight.detach() - before).abs()
        assert float(moved.max()) == pytest.approx(rate, rel=1e-2)


def test_a_batch_that_is_not_finite_changes_nothing(train_batch):
    updater = Updater(small_drafter())
    updater.update(Action.FULL, [train_batch])
    before = state_of(updater)
    hidden = train_batch.target_outputs.hidden.clone()
    hidden[1, 8, 3] = float("nan")
    poisoned = replace(
        train_batch, target_outputs=train_batch.target_outputs._replace(hidden=hidden)
    )
    for action in (Action.HEADS, Action.FULL):
        assert updater.update(action, [poisoned]) == []
    after = state_of(updater)
    assert not changed(before[0], after[0])
    assert str(before[1]) == str(after[1])  # moments and counts
    assert updater.steps == 1
    assert updater.update(Action.FULL, [poisoned, train_batch])


def test_a_gradient_that_is_not_finite_changes_nothing(train_batch):
    updater = Updater(small_drafter())
    updater.drafter.input_layer.fuse.weight.register_hook(lambda grad: grad * float("inf"))
    before = state_of(updater)[0]
    assert updater.update(Action.FULL, [train_batch]) == []
    assert not changed(before, state_of(updater)[0])


def test_the_anchor_is_zero_at_the_origin_and_holds_back(train_batch):
    drafter = small_drafter()
    at_origin = anchor(drafter, copy.deepcopy(drafter), train_batch)
    assert float(at_origin.detach()) == pytest.approx(0, abs=1e-6)
    away = {}
    for weight in (0.0, 10.0):
        updater = Updater(small_drafter(), AdaptationConfig(lr=1e-3, anchor=weight))
        updater.update(Action.FULL, [train_batch] * 15)
        away[weight] = float(anchor(updater.drafter, drafter, train_batch).detach())
    assert 0 < away[10.0] < away[0.0] / 2


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


def serve(pool: Pool, tau, count: int, seed: int = 0):
    """(number of the text, version) of each return; `tau` by number, with a shared spread."""
    draw, found = random.Random(seed), []
    for number in range(1, count + 1):
        text = draw.gauss(0, 0.3)  # paired: what is common to all versions matters little
        told = {v.number: exp(text + draw.gauss(0, 0.06)) / tau[v.number] for v in pool.kept}
        back = pool.judge(told)
        if back is not None:
            found.append((number, back.number))
    return found


@pytest.fixture
def pool() -> Pool:
    """A version, and another that was offered after it."""
    pool = Pool(Version(0, {}))
    pool.offer(Version(1, {}))
    return pool


def test_a_better_version_becomes_the_last_good_one_and_stays(pool):
    assert (pool.good.number, pool.current.number) == (0, 1)
    assert not serve(pool, {0: 2.0, 1: 2.3}, 200)
    assert pool.good.number == 1
    assert [each.number for each in pool.kept] == [1, 0]


def test_a_worse_version_is_left_for_the_one_before(pool):
    ((when, back),) = serve(pool, {0: 2.0, 1: 1.5}, 200)
    assert back == 0 == pool.current.number == pool.good.number
    assert 8 < when < 60
    assert pool.returns == [0]


def test_evidence_outlives_offers():
    """Offers come every few texts; were it forgotten, no worse line of versions would be left."""
    pool, found, tau = Pool(Version(0, {})), [], {0: 2.0}
    for number in range(1, 30):
        tau[number] = 1.5
        pool.offer(Version(number, {}))
        found += serve(pool, tau, 4, seed=number)
        if found:
            break
    assert found and number < 12


def test_a_domain_that_comes_back_finds_its_version(pool):
    assert not serve(pool, {0: 2.0, 1: 3.0}, 100)
    ((_, back),) = serve(pool, {0: 3.8, 1: 3.0}, 100)
    assert back == 0
    # What was good elsewhere is kept.
    assert pool.earlier is not None and pool.earlier.number == 1
    ((_, back),) = serve(pool, {0: 2.0, 1: 3.0}, 100)
    assert back == 1


def test_a_version_that_saves_steps_is_kept_though_most_texts_reach_further_with_the_other(pool):
    """Seven texts in ten: 4.0 tokens a step in place of 3.8; the others 1.5 in place of 1.9."""
    for number in range(200):
        before, after = (4.0, 3.8) if number % 10 < 7 else (1.5, 1.9)
        assert pool.judge({0: 1 / before, 1: 1 / after}) is None
    assert pool.current.number == 1


def test_a_text_too_short_to_say_changes_nothing(pool):
    assert pool.judge({0: nan, 1: nan}) is None
    assert serve(pool, {0: 2.0, 1: 1.5}, 60)
