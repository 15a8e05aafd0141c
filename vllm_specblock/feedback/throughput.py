"""Measured throughput of decode steps with and without drafts, by how many requests decode.

Batches that sample count apart from greedy ones: a sampled text is followed less far.

A model of what steps take is off by more than a draft wins where there is little to win: on a
busy processor a step's time is not its rows' alone. So both ways are timed, and the quicker one is
taken. Where drafts clearly pay, nobody asks; elsewhere one step in `EVERY` goes without them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

CLEAR = 1.25
"""Where drafting is so many times as quick as plain decoding, that is not timed again."""

EVERY = 48
"""Steps after which it is, elsewhere."""

_LAST_DRAFTING, _LAST_PLAIN = 15, 7
"""Of so many steps the median time counts: a pause of the machine is no time of ours."""

_ENOUGH, _ENOUGH_AGAIN = 8, 4
"""Steps with drafts before they say something: the first ones also prepare what they compute
with."""


class _Steps:
    """Tokens per request of steps, older ones counting less, and the times of the last ones.

    Per request, since a class has several numbers of requests, and what a step takes hardly depends
    on them: six plain requests against eight with drafts would look a third slower.
    """

    def __init__(self, last: int):
        self.seconds: deque[float] = deque(maxlen=last)
        self._weight = self._tokens = 0.0
        self.enough = _ENOUGH

    def add(self, tokens: float, seconds: float, keep: float) -> None:
        self.seconds.append(seconds)
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + tokens

    def forget(self) -> None:
        """All but what the tokens are on average, which counts as one step."""
        if not self._weight:
            return
        self.seconds.clear()
        self._weight, self._tokens = 1.0, self._tokens / self._weight
        self.enough = _ENOUGH_AGAIN

    @property
    def speed(self) -> float:
        return self._tokens / self._weight / median(self.seconds)


@dataclass
class _Class:
    """Batches that are compared with each other.

    since_plain: steps with drafts since the last plain one; at_rest: plain ones since the last with
    drafts; settled: the gain of a rest, once it has lasted.
    """

    drafting: _Steps = field(default_factory=lambda: _Steps(_LAST_DRAFTING))
    plain: _Steps = field(default_factory=lambda: _Steps(_LAST_PLAIN))
    since_plain: int = EVERY
    at_rest: int = 0
    settled: float | None = None

    @property
    def gain(self) -> float | None:
        if self.settled is not None:
            return self.settled
        if not self.plain.seconds or len(self.drafting.seconds) < self.drafting.enough:
            return None
        return self.drafting.speed / self.plain.speed


class Throughput:
    """Tokens per second of the two ways, as they were last seen.

    What drafts win differs from request to request, and a batch averages over them: of few
    requests more steps count. What a step takes changes with the machine's other work, so of plain
    steps only the last few do.
    """

    def __init__(self) -> None:
        self._classes: defaultdict[tuple[int, bool], _Class] = defaultdict(_Class)

    def observe(
        self,
        requests: int,
        drafting: bool,
        tokens: float,
        seconds: float,
        sampling: bool = False,
    ) -> None:
        """A step of so many requests committed so many tokens.

        Args:
            drafting: it verified trees, and made new ones. Else it did neither, or the time of
                making them is taken off.
            sampling: most of its requests do.
        """
        of = self._classes[_class_of(requests, sampling)]
        if drafting:
            of.drafting.add(tokens / requests, seconds, 0.98 ** min(requests, 8))
            of.since_plain += 1
            of.at_rest, of.settled = 0, None
        else:
            of.plain.add(tokens / requests, seconds, 0.6)
            of.since_plain = 0
            of.at_rest += 1
            if of.at_rest == _LAST_PLAIN:
                of.settled = of.gain

    def forget_drafting(self, requests: int, sampling: bool = False) -> None:
        """What is seen from now on counts, what was seen before hardly."""
        of = self._classes[_class_of(requests, sampling)]
        of.settled = None
        of.drafting.forget()

    def gain(self, requests: int, sampling: bool = False) -> float | None:
        """Speed with drafts over that without; None where one of them is not known.

        In a long rest it stays what it was near the last drafts: else a machine that becomes slower
        meanwhile would seem to be one on which drafts pay.
        """
        return self._classes[_class_of(requests, sampling)].gain

    def wants_plain(self, requests: int, sampling: bool = False) -> bool:
        """Whether the next step is to be a plain one, to be timed."""
        of = self._classes[_class_of(requests, sampling)]
        if not of.plain.seconds:
            return True
        return of.since_plain >= EVERY and of.gain is not None and of.gain < CLEAR


def _class_of(requests: int, sampling: bool) -> tuple[int, bool]:
    """1, 2, 3–4, 5–8, 9–16, … requests are one class each, of either kind."""
    return (requests - 1).bit_length(), sampling
