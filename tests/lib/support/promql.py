"""The part of PromQL that the Grafana dashboard uses, over two scrapes of `/metrics`.

As in Prometheus, what has no partner or no earlier sample is left out without a word: a query whose
labels do not fit gives nothing.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Samples = dict[str, Vector]
"""Sample name → its series."""

_TOKEN = re.compile(
    r'\s*(?:(\d+(?:\.\d+)?(?:e\d+)?)|([A-Za-z_][\w:]*)|(=~|[-+*/>(){},=])|"([^"]*)"|(\[[^]]+\]))'
)
_LEVEL: dict[str, tuple[int, Callable[[float, float], float]]] = {
    "+": (2, operator.add),
    "-": (2, operator.sub),
    "*": (3, operator.mul),
    "/": (3, operator.truediv),
}


def samples(page: str) -> Samples:
    """Of a page of `/metrics`."""
    found: Samples = defaultdict(dict)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name][frozenset(sample.labels.items())] = sample.value
    return found


@dataclass
class Scrapes:
    """Two of them, `seconds` apart: what a query sees at the second.

    Attributes:
        model: in the place of the dashboard's $model.
    """

    before: Samples
    after: Samples
    seconds: float
    model: str = ".*"

    def query(self, expression: str) -> Vector:
        """Its instant vector; a number is one without labels.

        Raises:
            ValueError: it is not of the part that is known here.
        """
        parser = _Parser(expression.replace("$model", self.model), self)
        value = parser.expression()
        if parser.token is not None:
            raise ValueError(f"{parser.token!r} is too much in {expression!r}")
        return value if isinstance(value, dict) else {frozenset(): value}

    def select(self, name: str, wanted: dict[str, str], rate: bool) -> Vector:
        def fits(labels: Labels) -> bool:
            given = dict(labels)
            return all(re.fullmatch(each, given.get(key, "")) for key, each in wanted.items())

        now = {labels: value for labels, value in self.after.get(name, {}).items() if fits(labels)}
        if not rate:
            return now
        then = self.before.get(name, {})
        return {x: (now[x] - then[x]) / self.seconds for x in now if x in then}


class _Parser:
    """By precedence; every method evaluates what it has read."""

    def __init__(self, text: str, scrapes: Scrapes) -> None:
        self.scrapes, self.tokens = scrapes, _tokens(text)
        self.token = next(self.tokens)

    def take(self, wanted: str | None = None) -> str:
        token = self.token
        if token is None or (wanted is not None and token != wanted):
            raise ValueError(f"{wanted or 'something'!r} was wanted, there is {token!r}")
        self.token = next(self.tokens)
        return token

    def expression(self, level: int = 1) -> Vector | float:
        left = self.operand()
        while (self.token == ">" and level <= 1) or self.token in _LEVEL:
            if self.token == ">":
                self.take()
                least = float(self.take())
                left = {x: value for x, value in left.items() if value > least}
                continue
            own, how = _LEVEL[self.token]
            if own < level:
                break
            self.take()
            spread = self.token == "on"
            if spread:  # the only matching that is used
                for word in ("on", "(", ")", "group_left", "(", ")"):
                    self.take(word)
            left = _matched(left, self.expression(own + 1), how, spread)
        return left

    def operand(self) -> Vector | float:
        if self.token == "(":
            return self.inside()
        word = self.take()
        if word[0].isdigit():
            return float(word)
        if word in ("sum", "max"):
            by = self.labels() if self.token == "by" else []
            return _aggregated(self.inside(), by, sum if word == "sum" else max)
        if word == "rate":
            self.take("(")
            found = self.selector(self.take(), rate=True)
            self.take(")")
            return found
        if word == "histogram_quantile":
            self.take("(")
            quantile = float(self.take())
            self.take(",")
            buckets = self.expression()
            self.take(")")
            return _quantile(quantile, buckets)
        return self.selector(word, rate=False)

    def inside(self) -> Vector | float:
        self.take("(")
        value = self.expression()
        self.take(")")
        return value

    def labels(self) -> list[str]:
        self.take("by")
        self.take("(")
        found = []
        while self.token != ")":
            found.append(self.take())
        self.take(")")
        return found

    def selector(self, name: str, rate: bool) -> Vector:
        wanted = {}
        self.take("{")
        while self.token != "}":
            key = self.take()
            self.take("=~")
            wanted[key] = self.take()
        self.take("}")
        if rate:
            self.take("[$__rate_interval]")
        return self.scrapes.select(name, wanted, rate)


def _tokens(text: str) -> Iterator[str | None]:
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at:]!r} is not known here")
        at = found.end()
        yield next(group for group in found.groups() if group is not None)
    yield None
    yield None


def _aggregated(vector: Vector, by: list[str], how: Callable[..., float]) -> Vector:
    groups: dict[Labels, list[float]] = defaultdict(list)
    for labels, value in vector.items():
        groups[frozenset(x for x in labels if x[0] in by)].append(value)
    return {labels: how(values) for labels, values in groups.items()}


def _matched(
    left: Vector | float,
    right: Vector | float,
    how: Callable[[float, float], float],
    spread: bool,
) -> Vector | float:
    if not isinstance(left, dict) and not isinstance(right, dict):
        return how(left, right)
    if not isinstance(left, dict):
        return {x: how(left, value) for x, value in right.items()}
    if not isinstance(right, dict):
        return {x: how(value, right) for x, value in left.items()}
    if spread:
        (one,) = right.values() or [float("nan")]
        right = dict.fromkeys(left, one)
    # As floats do in Prometheus: nothing over nothing is not a number.
    return {
        x: how(left[x], right[x]) if right[x] or how is not operator.truediv else float("nan")
        for x in left
        if x in right
    }


def _quantile(quantile: float, buckets: Vector) -> Vector:
    """The upper bound of the bucket that holds it: that it is in one is what is looked at here."""
    bounds = sorted((float(dict(labels)["le"]), value) for labels, value in buckets.items())
    if not bounds or not bounds[-1][1]:
        return {}
    inside = next(bound for bound, value in bounds if value >= quantile * bounds[-1][1])
    return {frozenset(): inside}
