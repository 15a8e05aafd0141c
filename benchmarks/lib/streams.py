"""Streams of requests whose domain changes: orders over the texts of two or more domains."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

HOME, AWAY = 0, 1
"""The drafter's own domain, and the first of the others."""
AGAIN = "home again"
"""Phase in which home is back after the other domains."""


@dataclass(frozen=True)
class Place:
    """One request of a stream: figures are taken over a phase; text: index into the domain's."""

    phase: str
    domain: int
    text: int


Stream = Sequence[Place]
"""A function of a stream takes the number of requests, a seed and the number of domains."""


def switch(length: int, seed: int, domains: int = 2) -> list[Place]:
    """A sixth home, the other domains in turn, a sixth home again; all texts new."""
    edge = length // 6
    away = [1 + domain for domain in _in_turn(length - 2 * edge, domains - 1)]
    found = _places([HOME] * edge + away + [HOME] * edge, domains)
    return found[: length - edge] + [replace(each, phase=AGAIN) for each in found[length - edge :]]


def mixed(length: int, seed: int, domains: int = 2) -> list[Place]:
    """All domains in equal parts, shuffled."""
    order = [number % domains for number in range(length)]
    random.Random(seed).shuffle(order)
    return _places(order, domains)


def ordered(length: int, seed: int, domains: int = 2) -> list[Place]:
    """The requests of `mixed`, one domain after the other."""
    return _places(_in_turn(length, domains), domains)


def stationary(length: int, seed: int, domains: int = 2) -> list[Place]:
    return _places([HOME] * length, domains)


def gradual(length: int, seed: int, domains: int = 2) -> list[Place]:
    """The share of the other domains rises from 0 to 1; phases are quarters."""
    draw = random.Random(seed)
    order = [
        draw.randrange(1, domains) if draw.random() < (number + 0.5) / length else HOME
        for number in range(length)
    ]
    return [
        replace(place, phase=f"quarter {1 + 4 * number // length}")
        for number, place in enumerate(_places(order, domains))
    ]


def passes(length: int, seed: int, domains: int = 2) -> list[Place]:
    """A mixed stream of an eighth of the requests, served eight times; a phase each."""
    once = mixed(max(1, length // 8), seed, domains)
    return [replace(place, phase=f"pass {n + 1}") for n in range(8) for place in once]


STREAMS = {each.__name__: each for each in (switch, mixed, ordered, stationary, gradual, passes)}


def texts_needed(streams: Sequence[Stream], domains: int = 2) -> list[int]:
    """Return the number of texts of each domain that these streams read."""
    most = [0] * domains
    for place in chain(*streams):
        most[place.domain] = max(most[place.domain], place.text + 1)
    return most


def _in_turn(length: int, domains: int) -> list[int]:
    """Domains 0, 1, … one after the other, in equal parts."""
    return [number * domains // length for number in range(length)]


def _places(order: Sequence[int], domains: int) -> list[Place]:
    names = ["home", *(f"away {n}" if domains > 2 else "away" for n in range(1, domains))]
    seen: Counter[int] = Counter()
    places = []
    for domain in order:
        places.append(Place(names[domain], domain, seen[domain]))
        seen[domain] += 1
    return places
