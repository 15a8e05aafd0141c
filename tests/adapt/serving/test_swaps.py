"""Two ranks swap to the same version at the same step, even if they see it at different times."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapting import VOCAB, Pair
from support.records import HIDDEN, small_drafter
from support.refreshed import served

from vllm_specblock.adapt.link.staged import StagedVersion
from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.serving import observer
from vllm_specblock.adapt.serving.swaps import EVERY, Swaps
from vllm_specblock.drafters.specblock.options import SpecBlockConfig
from vllm_specblock.drafters.specblock.refresh import RefreshError, held


class TwoRanks:
    """`Ranks` of two threads, which wait for each other."""

    def __init__(self, number: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.first = number == 0
        self._number, self._said, self._barrier = number, said, barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._barrier.wait(60)
        self._said[self._number] = value
        self._barrier.wait(60)
        return list(self._said)

    def alike(self, number: int) -> bool:
        return len(set(self._exchange(number))) == 1

    def from_first(self, numbers: Sequence[int]) -> list[int]:
        return self._exchange(numbers)[0]


def on_both_ranks(script: Callable[..., Any], *args: Any) -> list[Any]:
    """What a script returns on each rank; it is given the ranks, its number and the arguments."""
    said, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [TwoRanks(number, said, barrier) for number in range(2)]
        futures = [pool.submit(script, each, n, *args) for n, each in enumerate(ranks)]
        return [each.result() for each in futures]


class Refresh:
    """Stands in for `Refresh`: a version's weights are its number; negative ones are refused.

    Args:
        late: preparing takes up to so many turns.
    """

    def __init__(self, late: int = 0) -> None:
        self.serves, self.ready, self._coming = 0, False, None
        self._late, self._draw = late, random.Random(late)

    def start(self, number: int, hold: bool = False) -> None:
        self._coming, self.ready, self._held = number, False, hold
        self._left = self._draw.randint(self._late // 2, self._late)

    def release(self) -> None:
        self.ready = self._held = False

    def turn(self) -> float | None:
        self._left -= self._coming is not None
        if self._coming is None or self._left >= 0:
            return None
        if self._coming < 0:
            self._coming = None
            raise RefreshError("It is not finite.")
        self.ready = self._held
        if self._held:
            return None
        self.serves, self._coming = self._coming, None
        return 0.0


def version_of(number: int) -> StagedVersion:
    return StagedVersion(abs(number), 0, Action.FULL, number, abs(number))


class Script:
    """A link at which versions turn up; arrivals: by turn, the version's number."""

    def __init__(self, arrivals: dict[int, int]) -> None:
        self.arrivals, self.now = dict(arrivals), 0
        self.taken: list[tuple[int, int]] = []
        self.refused: list[int] = []

    def staged(self) -> StagedVersion | None:
        come = sorted(turn for turn in self.arrivals if turn <= self.now)
        numbers = [self.arrivals.pop(turn) for turn in come]
        return version_of(numbers[-1]) if numbers else None

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        self.taken.append((self.now, version.number))

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        self.refused.append(version.number)


def scripted(ranks, number: int, arrivals, turns: int, late=(0, 0)) -> SimpleNamespace:
    """What serves after each turn; late: per rank, see `Refresh`."""
    link, refresh, seen = Script(arrivals[number]), Refresh(late[number]), []
    swaps = Swaps(link, refresh, ranks)
    for link.now in range(1, turns + 1):
        swaps.turn()
        seen.append(refresh.serves)
    return SimpleNamespace(seen=seen, taken=link.taken, refused=link.refused)


def changes(seen: list[int]) -> dict[int, int]:
    """By turn, counted from 1, what serves from then on."""
    pairs = zip([0, *seen], seen)
    return {turn: now for turn, (before, now) in enumerate(pairs, 1) if now != before}


@pytest.mark.parametrize(
    ("arrivals", "serves", "refused"),
    [
        # One rank sees it much later; the next one both see between two agreements.
        (
            [{3: 1, 2 * EVERY + 20: 2}, {EVERY + 6: 1, 3 * EVERY: 2}],
            {2 * EVERY: 1, 3 * EVERY: 2},
            ([], []),
        ),
        # The first rank reads 1, replaced before the second looked; then both come to 3.
        ([{1: 1, EVERY + 1: 3}, {1: 2, 2 * EVERY + 1: 3}], {3 * EVERY: 3}, ([], [])),
        # What one rank refuses serves on none.
        ([{2: 1, 90: 2}, {2: -1, 90: 2}], {2 * EVERY: 2}, ([], [1])),
    ],
    ids=["late", "replaced", "refused"],
)
def test_a_version_serves_in_the_turn_in_which_all_have_it(arrivals, serves, refused):
    first, second = on_both_ranks(scripted, arrivals, 4 * EVERY)
    assert first.seen == second.seen and changes(first.seen) == serves
    assert first.taken == second.taken == list(serves.items())
    assert (first.refused, second.refused) == refused


def test_a_version_that_one_rank_has_not_prepared_serves_on_none():
    """Both ranks have read it before the first agreement; one takes longer than that."""
    first, second = on_both_ranks(scripted, [{3: 1}, {3: 1}], 4 * EVERY, (0, 2 * EVERY))
    assert first.seen == second.seen
    (moment,) = changes(first.seen)
    assert moment in (2 * EVERY, 3 * EVERY) and first.seen[-1] == 1


@pytest.mark.parametrize("late", [(0, 0), (9, 90)])
@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals(seed, late):
    """Each rank misses some versions, refuses some, and sees the others up to 300 turns late."""
    draw, turns = random.Random(seed), 40 * EVERY
    arrivals: list[dict[int, int]] = [{}, {}]
    for number in range(1, 21):
        staged = number * turns // 22
        for each in arrivals:
            if draw.random() < 0.9:
                refused = draw.random() < 0.1
                each[staged + draw.choice([1, 30, 60, 300])] = -number if refused else number
    first, second = on_both_ranks(scripted, arrivals, turns, late)
    assert first.seen == second.seen and first.taken == second.taken
    moments = changes(first.seen)
    assert len(moments) >= 2 and all(turn % EVERY == 0 for turn in moments)


def starting(ranks, number: int, bad: bool) -> SimpleNamespace:
    """A start whose choice changes before the second rank reads it; bad: that rank cannot."""
    refresh, link, reads = Refresh(), Script({}), []

    def current() -> StagedVersion | None:
        reads.append(None)
        if bad:
            return None if number else version_of(5)
        return version_of(7 if number or len(reads) > 1 else 6)

    link.current = current
    Swaps(link, refresh, ranks).start()
    return SimpleNamespace(serves=refresh.serves, reads=len(reads))


@pytest.mark.parametrize("bad", [False, True])
def test_a_start(bad):
    """The choice changes while ranks read, or the second one cannot read it: then none serves."""
    first, second = on_both_ranks(starting, bad)
    assert first.serves == second.serves == (0 if bad else 7)
    assert first.reads == second.reads == (3 if bad else 2)


def digest(drafter) -> float:
    return float(sum(tensor.float().sum() for _, tensor in held(drafter)))


def linked(ranks, number: int, folder: Path, model) -> SimpleNamespace:
    """A start with a version that is current in a folder, where a person then chooses another."""
    pair, model = Pair.at(folder / "pair"), model[number]
    target: Any = SimpleNamespace(
        model=str(pair.target), get_hidden_size=lambda: HIDDEN, dtype=torch.float32
    )
    resolved: Any = SimpleNamespace(folder=str(pair.drafter), options=SpecBlockConfig(num_blocks=1))
    options = AdaptConfig(trainer=str(folder / "requests"))
    swaps, sink = observer.link_up(target, resolved, options, SimpleNamespace(model=model), ranks)
    seen = [digest(model)]
    if ranks.first:
        swaps.link.versions.use(None)
    for _ in range(12 * EVERY):
        swaps.turn()
        seen.append(digest(model))
        time.sleep(2e-3)
    swaps.link.close()
    return SimpleNamespace(seen=seen, trainer=swaps.trainer, sink=sink, counts=swaps.link.counts)


def test_a_folder(tmp_path):
    def drafter(seed: int):
        return served(small_drafter(seed, vocab=VOCAB))

    (tmp_path / "pair").mkdir()
    versions = Pair.make(tmp_path / "pair").versions(tmp_path / "requests/versions")
    versions.lock()
    versions.use(versions.write(small_drafter(1, vocab=VOCAB), {"parent": None}))
    versions.unlock()
    first, second = on_both_ranks(linked, tmp_path, [drafter(3), drafter(3)])
    assert first.seen == second.seen and first.seen[0] == digest(drafter(1))
    assert first.seen[-1] == digest(drafter(3)), "the delivered drafter was chosen meanwhile"
    assert first.trainer is None and first.sink and second.sink is None
    assert first.counts["swaps"] == second.counts["swaps"] == 2
