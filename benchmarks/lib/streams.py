"""Streams of requests whose domain changes, as orders over the texts of two domains or more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_specblock.train.config import TrainError

HOME, AWAY = 0, 1
"""The domain that the drafter was trained on, and the first of the others."""

AGAIN = "home again"
"""Phase in which a domain is back that others came after."""


@dataclass(frozen=True)
class Place:
    """One request of a stream.

    Attributes:
        phase: what figures are taken over.
        domain: `HOME`, `AWAY`, or one that follows.
        text: index into the domain's texts; the same one may come again.
    """

    phase: str
    domain: int
    text: int


Stream = Sequence[Place]


def phase_of(domain: int, domains: int) -> str:
    """What the requests of a domain are called, of so many domains."""
    if domain == HOME:
        return "home"
    return "away" if domains == 2 else f"away {domain}"


def switch(length: int, seed: int, domains: int = 2) -> list[Place]:
    """A sixth home, four sixths away, one domain after the other, a sixth home again; all texts
    new."""
    edge = length // 6
    away = [1 + domain for domain in in_turn(length - 2 * edge, domains - 1)]
    order = [HOME] * edge + away + [HOME] * edge
    phases = [phase_of(domain, domains) for domain in order]
    return _places(order, phases[: length - edge] + [AGAIN] * edge)


def mixed(length: int, seed: int, domains: int = 2) -> list[Place]:
    """All domains in equal parts, shuffled."""
    order = [number % domains for number in range(length)]
    random.Random(seed).shuffle(order)
    return _places(order, [phase_of(domain, domains) for domain in order])


def ordered(length: int, seed: int, domains: int = 2) -> list[Place]:
    """The requests of `mixed`, one domain after the other."""
    order = in_turn(length, domains)
    return _places(order, [phase_of(domain, domains) for domain in order])


def stationary(length: int, seed: int, domains: int = 2) -> list[Place]:
    """Home alone."""
    return _places([HOME] * length, [phase_of(HOME, domains)] * length)


def gradual(length: int, seed: int, domains: int = 2) -> list[Place]:
    """The share of the other domains rises from 0 to 1; phases are quarters."""
    draw = random.Random(seed)
    order = [
        draw.randrange(1, domains) if draw.random() < (number + 0.5) / length else HOME
        for number in range(length)
    ]
    return _places(order, [f"quarter {1 + 4 * number // length}" for number in range(length)])


def passes(length: int, seed: int, domains: int = 2, times: int = 8) -> list[Place]:
    """A mixed stream of `length` / `times` requests, served so many times; a phase each."""
    once = mixed(max(1, length // times), seed, domains)
    return [
        Place(f"pass {number + 1}", place.domain, place.text)
        for number in range(times)
        for place in once
    ]


def in_turn(length: int, domains: int) -> list[int]:
    """Domains 0, 1, … one after the other, in equal parts."""
    return [number * domains // length for number in range(length)]


STREAMS: dict[str, Callable[[int, int, int], list[Place]]] = {
    "switch": switch,
    "mixed": mixed,
    "ordered": ordered,
    "stationary": stationary,
    "gradual": gradual,
    "passes": passes,
}
"""By name: (number of requests, seed, number of domains) -> stream."""


def make_stream(name: str, length: int, seed: int, domains: int = 2) -> list[Place]:
    """A stream by name.

    Args:
        domains: home and the others.
    """
    if name not in STREAMS:
        raise TrainError(f"There is no stream {name!r}: choose one of {', '.join(STREAMS)}.")
    return STREAMS[name](length, seed, domains)


def texts_needed(streams: Sequence[Stream], domains: int = 2) -> list[int]:
    """How many texts of each domain these streams read."""
    most = [0] * domains
    for stream in streams:
        for place in stream:
            most[place.domain] = max(most[place.domain], place.text + 1)
    return most


def _places(domains: Sequence[int], phases: Sequence[str]) -> list[Place]:
    seen: Counter[int] = Counter()
    places = []
    for domain, phase in zip(domains, phases, strict=True):
        places.append(Place(phase, domain, seen[domain]))
        seen[domain] += 1
    return places
