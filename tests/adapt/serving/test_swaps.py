"""Ranks, stood for by two threads, swap to the same version at the same step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapting import VOCAB, Pair
from support.records import HIDDEN, small_drafter
from support.refreshed import served, values, weights

from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.serving import observer
from vllm_specblock.adapt.serving.swaps import EVERY, Swaps, _prepare
from vllm_specblock.adapt.versions import StagedVersion
from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock.model import SpecBlockModel


class TwoRanks:
    """`Ranks` of two threads, which wait for each other."""

    def __init__(self, number: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.first = number == 0
        self._number, self._said, self._barrier = number, said, barrier

    def gather(self, number: int) -> list[int]:
        self._barrier.wait(60)
        self._said[self._number] = number
        self._barrier.wait(60)
        return list(self._said)


def on_both_ranks(script: Callable[..., Any], *args: Any) -> list[Any]:
    """What a script returns on each rank; it is given the ranks, its number and the arguments."""
    said, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(script, TwoRanks(number, said, barrier), number, *args)
            for number in range(2)
        ]
        return [each.result() for each in futures]


# ---- drafters and versions ----


_SEEDING = threading.Lock()


def drafter_of(seed: int) -> SpecBlockModel:
    with _SEEDING:  # torch has one seed for all threads
        return small_drafter(seed, vocab=VOCAB)


def served_of(seed: int) -> SpecBlockModel:
    return served(drafter_of(seed))


def digest(drafter: SpecBlockModel) -> str:
    """Of every tensor that serves, bit for bit."""
    found = torch.cat([value for _, value in sorted(values(drafter).items())])
    return sha256(found.numpy()).hexdigest()[:8]


def digest_of(seed: int) -> str:
    return digest(served_of(seed))


class Script:
    """A link at which versions turn up when a script says.

    Args:
        arrivals: by turn, the version's number, whose weights are of that seed; negative: with a
            number that is not finite.
    """

    def __init__(self, arrivals: dict[int, int]) -> None:
        self.arrivals, self.now = arrivals, 0
        self.taken: list[tuple[int, int]] = []
        self.refused: list[int] = []

    def staged(self) -> StagedVersion | None:
        come = [turn for turn in self.arrivals if turn <= self.now]
        if not come:
            return None
        number = [self.arrivals.pop(turn) for turn in sorted(come)][-1]
        tensors = weights(drafter_of(abs(number)))
        if number < 0:
            tensors["norm.weight"] = tensors["norm.weight"] * float("nan")
        return StagedVersion(abs(number), 0, Action.FULL, tensors, abs(number))

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        self.taken.append((self.now, version.number))

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        self.refused.append(version.number)

    @property
    def counts(self) -> dict[str, int]:
        return {}


# ---- What a rank does, and what it serves turn by turn ----


class Late:
    """A future that is done after some turns."""

    def __init__(self, call: Callable[[], Any], turns: int) -> None:
        self.result, self.turns = cache(call), turns

    def done(self) -> bool:
        self.turns -= 1
        return self.turns < 0


def scripted(
    ranks: TwoRanks,
    number: int,
    arrivals: list[dict[int, int]],
    turns: int,
    late: tuple[int, int] = (0, 0),
) -> SimpleNamespace:
    """What serves after each turn.

    late: per rank, a version is prepared beside up to so many turns, as for a GPU.
    """
    model, link, seen = served_of(0), Script(arrivals[number]), []
    swaps = Swaps(link, model, ranks)
    if most := late[number]:
        draw = random.Random(most)
        swaps._pool = SimpleNamespace(
            submit=lambda _, *args: Late(partial(_prepare, *args), draw.randint(most // 2, most))
        )
    for link.now in range(1, turns + 1):
        swaps.turn()
        seen.append(digest(model))
    return SimpleNamespace(seen=seen, taken=link.taken, refused=link.refused)


def starting(ranks: TwoRanks, number: int, bad: bool) -> SimpleNamespace:
    """A start whose choice changes before the second rank reads it.

    Args:
        bad: the second rank cannot read it.
    """
    model, reads = served_of(0), 0

    def current() -> StagedVersion | None:
        nonlocal reads
        reads += 1
        if bad:
            return None if number else StagedVersion(5, 0, Action.FULL, weights(drafter_of(5)), 5)
        seed = 7 if number or reads > 1 else 6
        return StagedVersion(seed, 0, Action.FULL, weights(drafter_of(seed)), seed)

    link = Script({})
    link.current = current
    Swaps(link, model, ranks).start()
    return SimpleNamespace(seen=digest(model), reads=reads)


def linked(ranks: TwoRanks, number: int, folder: Path) -> SimpleNamespace:
    """A start with a version that is current in a folder, where a person then chooses another."""
    model, pair = served_of(3), Pair.at(folder / "pair")
    drafter: Any = SimpleNamespace(model=model)
    target: Any = SimpleNamespace(
        model=str(pair.target), get_hidden_size=lambda: HIDDEN, dtype=torch.float32
    )
    resolved: Any = SimpleNamespace(folder=str(pair.drafter), options=SpecBlockConfig(num_blocks=1))
    options = AdaptConfig(trainer=str(folder / "requests"))
    swaps, sink = observer.link_up(target, resolved, options, drafter, ranks)
    seen = [digest(model)]
    if ranks.first:
        swaps.link.versions.use(None)
    for _ in range(12 * EVERY):
        swaps.turn()
        seen.append(digest(model))
        time.sleep(2e-3)
    swaps.link.close()
    return SimpleNamespace(
        seen=seen, trainer=swaps.trainer is not None, sink=sink, counts=swaps.link.counts
    )


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
