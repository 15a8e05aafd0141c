"""Slabs against plain lists, and ranks that swap to the same version at the same step."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapting import VOCAB, Pair
from support.rank_pair import (
    Script,
    digest,
    digest_of,
    linked,
    on_both_ranks,
    scripted,
    served_of,
    starting,
)
from support.records import small_drafter
from support.slab_traffic import HIDDEN, Engine, serve, serve_late

from vllm_specblock.adapt.serving.slabs import Slabs
from vllm_specblock.adapt.serving.swaps import EVERY, Swaps


@pytest.mark.parametrize("late", [False, True], ids=["host", "late device"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), length=st.integers(1, 120))
def test_records_are_what_was_said(late, seed, length):
    """Late: of a device that is behind."""
    serve_late(seed, length) if late else serve(Engine(seed), length)


@pytest.mark.parametrize("late", [False, True], ids=["host", "late device"])
def test_everything_happens_in_it(late):
    """What the properties are worth: all that can happen did."""
    streams = (serve_late(n, 300) if late else serve(Engine(n), 300) for n in range(12))
    seen = sum(streams, Counter())  # without what never happened
    wanted = {"records", "moved", "ran out", "no slab", "resumed", "cached", "stopped"}
    assert seen.keys() == wanted | ({"on the way", "moved early"} if late else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_record_has_the_dtype_of_the_target(dtype):
    slabs = Slabs(2, HIDDEN, dtype, slabs=1, rows=80)
    assert slabs.begin(0, "a", prompt=1, computed=0, now=0.0)
    assert not slabs.begin(1, "b", prompt=1, computed=0, now=0.0), "there is one slab"
    slabs.tensors.end[0] += 3
    assert slabs.end(0, now=1.0)
    ((record, finished, last),) = slabs.arrived()
    assert record.states.dtype == record.last.dtype == dtype and len(record.tokens) == 3
    assert last and finished is None, "nothing was drafted for it"
    assert not slabs.end(0, now=1.0) and slabs.begin(1, "b", prompt=1, computed=0, now=0.0)


def changes(seen: list[str]) -> dict[int, str]:
    """By turn, counted from 1, what serves from then on."""
    before = [digest_of(0), *seen]
    return {turn: now for turn, now in enumerate(seen, 1) if now != before[turn - 1]}


@pytest.mark.parametrize(
    ("arrivals", "moments", "refused"),
    [
        # One rank sees it much later; the next one both see between two agreements.
        (
            ({3: 1, 2 * EVERY + 20: 2}, {EVERY + 6: 1, 3 * EVERY: 2}),
            {2 * EVERY: 1, 3 * EVERY: 2},
            [],
        ),
        # The first rank reads 1, replaced before the second looked; then both come to 3.
        (({1: 1, EVERY + 1: 3}, {1: 2, 2 * EVERY + 1: 3}), {3 * EVERY: 3}, []),
        (({2: 1, 90: 2}, {2: -1, 90: 2}), {2 * EVERY: 2}, [1]),  # one rank refuses it
    ],
)
def test_a_version_serves_in_the_turn_in_which_all_have_it(arrivals, moments, refused):
    first, second = on_both_ranks(scripted, arrivals, 4 * EVERY)
    assert first.seen == second.seen
    assert changes(first.seen) == {turn: digest_of(number) for turn, number in moments.items()}
    assert first.taken == second.taken == list(moments.items())
    assert (first.refused, second.refused) == ([], refused)


def test_a_version_that_one_rank_has_not_prepared_serves_on_none():
    """Both ranks have read it before the first agreement; one takes longer than that."""
    first, second = on_both_ranks(scripted, [{3: 1}, {3: 1}], 4 * EVERY, (0, 2 * EVERY))
    assert first.seen == second.seen
    (moment,) = changes(first.seen)
    assert moment in (2 * EVERY, 3 * EVERY) and first.seen[-1] == digest_of(1)


@pytest.mark.parametrize(("seed", "late"), [(0, (0, 0)), (1, (9, 90)), (2, (9, 90))])
def test_random_arrivals(seed, late):
    """Each rank misses some versions, refuses some, and sees the others up to 300 turns late."""
    draw, turns = random.Random(seed), 40 * EVERY
    arrivals: list[dict[int, int]] = [{}, {}]
    for number in range(1, 21):
        staged = number * turns // 22
        for each in arrivals:
            if draw.random() < 0.9:
                each[staged + draw.choice([1, 30, 60, 300])] = (
                    -number if draw.random() < 0.1 else number
                )
    first, second = on_both_ranks(scripted, arrivals, turns, late)
    assert first.seen == second.seen and len(first.seen) == turns
    moments = changes(first.seen)
    assert len(moments) >= 2 and all(turn % EVERY == 0 for turn in moments)
    assert [number for _, number in first.taken] == [number for _, number in second.taken]


def test_a_folder(tmp_path):
    (tmp_path / "pair").mkdir()
    versions = Pair.make(tmp_path / "pair").versions(tmp_path / "requests/versions")
    versions.lock()
    versions.use(versions.write(small_drafter(1, vocab=VOCAB), {"parent": None}))
    versions.unlock()
    first, second = on_both_ranks(linked, tmp_path)
    assert first.seen == second.seen and first.seen[0] == digest_of(1)
    assert first.seen[-1] == digest_of(3), "the delivered drafter was chosen meanwhile"
    assert not first.trainer and first.sink and second.sink is None
    assert first.counts["swaps"] == second.counts["swaps"] == 2


@pytest.mark.parametrize("bad", [False, True])
def test_a_start(bad):
    """The choice changes while ranks read, or the second one cannot read it: then none serves."""
    first, second = on_both_ranks(starting, bad)
    assert first.seen == second.seen == digest_of(0 if bad else 7)
    assert first.reads == second.reads == (3 if bad else 2)


@pytest.mark.parametrize("threaded", [False, True], ids=["cpu", "gpu"])
def test_refused_weights_leave_what_serves_and_room_for_the_next(threaded, monkeypatch):
    """On a GPU a thread prepares weights over several turns; they serve whole, or not at all."""
    model, link = served_of(0), Script({})
    swaps = Swaps(link, model)
    if threaded:
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
        swaps._pool = ThreadPoolExecutor(1)

    def after(number: int) -> str:
        """What serves once a version was taken or refused."""
        link.arrivals, before = {0: number}, len(link.taken) + len(link.refused)
        for _ in range(10_000):
            swaps.turn()
            if len(link.taken) + len(link.refused) > before:
                return digest(model)
            time.sleep(1e-4)
        raise AssertionError("the version never came")

    assert after(2) == digest_of(2)
    assert after(-3) == digest_of(2)
    if threaded:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", None)  # a fault of another kind
            assert after(4) == digest_of(2)
    assert after(5) == digest_of(5)
    assert link.refused == ([3, 4] if threaded else [3])
    assert [number for _, number in link.taken] == [2, 5]
