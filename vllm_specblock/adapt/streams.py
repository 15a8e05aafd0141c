"""Streams of requests whose domain changes, as orders over the texts of two domains."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_specblock.train.config import TrainError

HOME, AWAY = 0, 1
"""The domain that the drafter was trained on, and the other one."""

PHASES = ("home", "away", "home again")


@dataclass(frozen=True)
class Place:
    """One request of a stream.

    Attributes:
        phase: what figures are taken over.
        domain: `HOME` or `AWAY`.
        text: index into the domain's texts; the same one may come again.
    """

    phase: str
    domain: int
    text: int


Stream = Sequence[Place]


def switch(length: int, seed: int) -> list[Place]:
    """A sixth home, four sixths away, a sixth home again, all texts new."""
    edge = length // 6
    domains = [HOME] * edge + [AWAY] * (length - 2 * edge) + [HOME] * edge
    phases = [PHASES[0]] * edge + [PHASES[1]] * (length - 2 * edge) + [PHASES[2]] * edge
    return _places(domains, phases)


def mixed(length: int, seed: int) -> list[Place]:
    """Both domains in equal parts, shuffled."""
    domains = [number % 2 for number in range(length)]
    random.Random(seed).shuffle(domains)
    return _places(domains, [PHASES[domain] for domain in domains])


def stationary(length: int, seed: int) -> list[Place]:
    """Home alone."""
    return _places([HOME] * length, [PHASES[0]] * length)


def gradual(length: int, seed: int) -> list[Place]:
    """The share of the other domain rises from 0 to 1; phases are quarters."""
    draw = random.Random(seed)
    domains = [int(draw.random() < (number + 0.5) / length) for number in range(length)]
    return _places(domains, [f"quarter {1 + 4 * number // length}" for number in range(length)])


def passes(length: int, seed: int, times: int = 8) -> list[Place]:
    """A mixed stream of `length` / `times` requests, served so many times; a phase each."""
    once = mixed(max(1, length // times), seed)
    return [
        Place(f"pass {number + 1}", place.domain, place.text)
        for number in range(times)
        for place in once
    ]


STREAMS: dict[str, Callable[[int, int], list[Place]]] = {
    "switch": switch,
    "mixed": mixed,
    "stationary": stationary,
    "gradual": gradual,
    "passes": passes,
}
"""By name: (number of requests, seed) -> stream."""


def make_stream(name: str, length: int, seed: int) -> list[Place]:
    """A stream by name.

    Raises:
        TrainError: there is none of that name, or it has no request.
    """
    if name not in STREAMS:
        raise TrainError(f"There is no stream {name!r}: choose one of {', '.join(STREAMS)}.")
    if length < 1:
        raise TrainError(f"A stream has at least 1 request, but {length} were asked for.")
    return STREAMS[name](length, seed)


def texts_needed(streams: Sequence[Stream]) -> tuple[int, int]:
    """How many texts of each domain these streams read."""
    most = Counter({HOME: 0, AWAY: 0})
    for stream in streams:
        for place in stream:
            most[place.domain] = max(most[place.domain], place.text + 1)
    return most[HOME], most[AWAY]


def _places(domains: Sequence[int], phases: Sequence[str]) -> list[Place]:
    seen: Counter[int] = Counter()
    places = []
    for domain, phase in zip(domains, phases, strict=True):
        places.append(Place(phase, domain, seen[domain]))
        seen[domain] += 1
    return places
