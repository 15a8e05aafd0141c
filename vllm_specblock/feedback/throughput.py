"""Measured throughput of decode steps with and without drafts, by how many requests decode.

Batches that sample count apart from greedy ones: a sampled text is followed less far.

A model of what steps take is off by more than a draft wins where there is little to win: on a
busy processor a step's time is not its rows' alone. So both ways are timed, and the quicker one is
taken. Where drafts pay little, plain decoding is timed again every `EVERY` steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

EVERY = 48
"""Steps after which plain decoding is timed again."""

CLEAR, SELDOM = 1.25, 4
"""Where drafting is so many times as quick, that is after so many times as many steps. Never would
not do: a machine that was slow at the time makes drafts seem to pay for good."""

_LAST_DRAFTING, _LAST_PLAIN = 15, 7
"""Of so many steps the median time counts: a pause of the machine is no time of ours."""

_ENOUGH, _ENOUGH_AGAIN = 8, 4
"""Steps with drafts before they say something: the first ones also prepare what they compute
with."""

_PROMPT_STEPS = 128
"""Steps with drafts that what drafters take for prompts is spread over: a rest saves that, too."""


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

    def speed(self, beside: float = 0.0) -> float:
        """Tokens per second of a request; `beside`: seconds that every step costs elsewhere."""
        return self._tokens / self._weight / (median(self.seconds) + beside)


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

    def gain(self, beside: float) -> float | None:
        if self.settled is not None:
            return self.settled
        if not self.plain.seconds or len(self.drafting.seconds) < self.drafting.enough:
            return None
        return self.drafting.speed(beside) / self.plain.speed()


class Throughput:
    """Tokens per second of the two ways, as they were last seen.

    What drafts win differs from request to request, and a batch averages over them: of few
    requests more steps count. What a step takes changes with the machine's other work, so of plain
    steps only the last few do.
    """

    def __init__(self) -> None:
        self._classes: defaultdict[tuple[int, bool], _Class] = defaultdict(_Class)
        # As if there had been many steps: the first prompts come before the first steps.
        self._prompt_seconds, self._steps = 0.0, float(_PROMPT_STEPS)

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
            drafting: it verified trees, and made new ones. Else it did neither: a step that only
                makes some takes a quarter longer than a plain one and that together.
            sampling: most of its requests do.
        """
        of = self._classes[_class_of(requests, sampling)]
        if drafting:
            keep = 1 - 1 / _PROMPT_STEPS
            self._prompt_seconds, self._steps = keep * self._prompt_seconds, keep * self._steps + 1
            of.drafting.add(tokens / requests, seconds, 0.98 ** min(requests, 8))
            of.since_plain += 1
            of.at_rest, of.settled = 0, None
        else:
            of.plain.add(tokens / requests, seconds, 0.6)
            of.since_plain = 0
            of.at_rest += 1
            if of.at_rest == _LAST_PLAIN:
                of.settled = of.gain(self._beside)

    def observe_prompts(self, seconds: float) -> None:
        """Take note of a step in which drafters read prompts: what that took."""
        self._prompt_seconds += seconds

    @property
    def _beside(self) -> float:
        return self._prompt_seconds / self._steps

    def forget_drafting(self, requests: int, sampling: bool = False) -> None:
        """What is seen from now on counts, what was seen before hardly."""
        of = self._classes[_class_of(requests, sampling)]
        of.settled = None
        of.drafting.forget()

    def gain(self, requests: int, sampling: bool = False) -> float | None:
        """Speed with drafts over that without; None where one of them is not known.

        In a long rest it stays what it was near the last drafts: else a machine that becomes slower
        meanwhile would seem to be one on which drafts pay. Of batches that were not timed: what it
        is of their neighbours if drafts lose in all that were, since to time them costs most there.
        """
        size, _ = own = _class_of(requests, sampling)
        found = self._classes[own].gain(self._beside)
        if found is not None:
            return found
        near = [(size - 1, sampling), (size + 1, sampling)]
        if sampling:  # of greedy ones more is accepted
            near.append((size, False))
        gains = [self._classes[each].gain(self._beside) for each in near if each in self._classes]
        known = [gain for gain in gains if gain is not None]
        return max(known) if known and max(known) < 1 else None

    def wants_plain(self, requests: int, sampling: bool = False) -> bool:
        """Whether the next step is to be a plain one, to be timed."""
        of = self._classes[_class_of(requests, sampling)]
        if not of.plain.seconds:
            return True
        gain = of.gain(self._beside)
        return gain is not None and of.since_plain >= EVERY * (1 if gain < CLEAR else SELDOM)


def _class_of(requests: int, sampling: bool) -> tuple[int, bool]:
    """1, 2, 3–4, 5–8, 9–16, … requests are one class each, of either kind."""
    return (requests - 1).bit_length(), sampling
