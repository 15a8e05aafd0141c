"""The cost-aware bandit: which arm a request is pushed to (SpecBlock §3.4, A.3, Algorithm 1).

Two rules share the paper's schedule (warm-up, cold start, cooldown, buffers) and differ in what an
arm is worth: `PaperBandit` is Algorithm 1 as printed, `GainBandit` weighs judged gains against
measured seconds.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass

from vllm_specblock.adapt.policy.interface import EVERY, Action, Decision, FinishedRequest, Policy

ARMS = (Action.HEADS, Action.FULL)


@dataclass(frozen=True)
class Schedule:
    """When a bandit may train, and when it explores; the defaults are the paper's (A.3).

    Attributes:
        warm_up: requests before anything is pushed.
        cold_start: updates during which an arm is always taken.
        epsilon: share of exploring requests at the first and after the last of them, linear.
        cooldown: requests after an update in which none begins.
        buffer: requests that make an update.
        explore_every: after the cold start, one request in so many may begin to explore, with the
            last `epsilon`. The paper says nothing; without it a bandit that skips skips for ever.
        largest: the most that an update may change.
    """

    warm_up: int = 10
    cold_start: int = 8
    epsilon: tuple[float, float] = (0.30, 0.10)
    cooldown: int = 2
    buffer: int = EVERY
    explore_every: int = 64
    largest: Action = Action.FULL

    @property
    def arms(self) -> tuple[Action, ...]:
        return ARMS[: ARMS.index(self.largest) + 1]


class Bandit(Policy):
    """The schedule of A.3; a rule says what arms are worth.

    Args:
        schedule: see there.
        seed: of the exploration.

    Attributes:
        events: updates so far.
        values: v of each arm.
    """

    gated = True

    def __init__(self, schedule: Schedule | None = None, seed: int = 0) -> None:
        self.schedule = schedule or Schedule()
        self.events = 0
        self.values = dict.fromkeys(self.schedule.arms, 0.0)
        self._draw = random.Random(seed)
        self._seen = self._blocked = 0
        self._buffers: dict[Action, list[FinishedRequest]] = {a: [] for a in self.schedule.arms}
        self._exploring: Action | None = None  # until this arm's buffer is full
        self._alarmed = False

    @abstractmethod
    def predicted(self, request: FinishedRequest) -> dict[Action, float]:
        """What an update of each arm is expected to gain; ≤ 0: not worth it [SpecBlock, eq. 9]."""

    @abstractmethod
    def began(self, action: Action, buffered: list[FinishedRequest]) -> None:
        """An update began, from these requests; the last of them filled the buffer."""

    def decide(self, request: FinishedRequest) -> Decision:
        self._seen += 1
        blocked = self._blocked > 0
        self._blocked = max(0, self._blocked - 1)
        if self._seen <= self.schedule.warm_up:
            return Decision(Action.SKIP)
        action = self._choose(request)
        if action is Action.SKIP:
            return Decision(action)
        buffered = self._buffers[action]
        buffered.append(request)
        if blocked or len(buffered) < self.schedule.buffer:
            return Decision(action)
        self._buffers[action] = []
        self._blocked, self.events = self.schedule.cooldown, self.events + 1
        if self._exploring is action:
            self._exploring = None
        self.began(action, buffered)
        return Decision(action, update=True)

    def alarm(self) -> None:
        self._alarmed = True

    @property
    def epsilon(self) -> float:
        """Share of requests that explore now."""
        first, last = self.schedule.epsilon
        return first + (last - first) * min(1.0, self.events / self.schedule.cold_start)

    def _choose(self, request: FinishedRequest) -> Action:
        predicted, arms = self.predicted(request), self.schedule.arms
        best = max(arms, key=lambda arm: predicted[arm])  # the cheaper of equals
        if self.events < self.schedule.cold_start:
            return self._draw.choice(arms) if self._draw.random() < self.epsilon else best
        self._consider_exploring()
        if self._exploring is not None:
            return self._exploring
        return best if predicted[best] > 0 else Action.SKIP

    def _consider_exploring(self) -> None:
        # A whole update, not a request: single pushes in a hundred never fill a buffer in time.
        due = self._seen % self.schedule.explore_every == 0
        if self._alarmed or (due and self._draw.random() < self.epsilon):
            self._alarmed = False
            self._exploring = self._exploring or self._draw.choice(self.schedule.arms)


class PaperBandit(Bandit):
    """Algorithm 1 as printed, with its rollback.

    Δ_tp of an update is the throughput of the N requests after it over that of the N before, less
    one. An update that begins before the interval of the one before has closed takes its place:
    the algorithm keeps one s_trig.

    Args:
        schedule, seed: see `Bandit`.
        alpha: of the EWMA [SpecBlock, eq. 10].
        least_signal: s_min; below, an update teaches nothing.
        interval: N, requests of a measurement and of a window of τ.

    Attributes:
        roll_backs: so far.
    """

    gated = False

    def __init__(
        self,
        schedule: Schedule | None = None,
        seed: int = 0,
        alpha: float = 0.10,
        least_signal: float = 5.0,
        interval: int = 8,
    ) -> None:
        super().__init__(schedule, seed)
        self.alpha, self.least_signal, self.interval = alpha, least_signal, interval
        self.roll_backs = 0
        self._recent: deque[FinishedRequest] = deque(maxlen=interval)
        self._trigger: tuple[Action, float, float] | None = None  # arm, s_trig, tokens/s before
        self._after: list[FinishedRequest] = []
        self._window: list[FinishedRequest] = []
        self._taus: list[float] = []

    def predicted(self, request: FinishedRequest) -> dict[Action, float]:
        return {arm: request.misses * value for arm, value in self.values.items()}

    def decide(self, request: FinishedRequest) -> Decision:
        self._recent.append(request)
        self._measure(request)
        falls, good = self._close_window(request)
        if falls:
            self.roll_backs += 1
            self.values = dict.fromkeys(self.values, 0.0)
            self._taus.clear()
            self._trigger = None  # what is measured now is another version
        decision = super().decide(request)
        return Decision(decision.push, decision.update, falls, good)

    def began(self, action: Action, buffered: list[FinishedRequest]) -> None:
        self._trigger = action, buffered[-1].misses, _throughput(self._recent)
        self._after = []

    def _measure(self, request: FinishedRequest) -> None:
        if self._trigger is None:
            return
        self._after.append(request)
        if len(self._after) < self.interval:
            return
        (action, signal, before), self._trigger = self._trigger, None
        if signal >= self.least_signal:
            gain = _throughput(self._after) / before - 1
            old = self.values[action]
            self.values[action] = (1 - self.alpha) * old + self.alpha * gain / signal

    def _close_window(self, request: FinishedRequest) -> tuple[bool, bool]:
        """(τ fell over three windows in a row, it did not fall over the last two)."""
        self._window.append(request)
        if len(self._window) < self.interval:
            return False, False
        window, self._window = self._window, []
        tau = sum(each.tokens for each in window) / sum(each.steps for each in window)
        good = not self._taus or tau >= self._taus[-1]
        self._taus = [*self._taus[-2:], tau]
        three = len(self._taus) == 3
        return three and self._taus[0] > self._taus[1] > self._taus[2], good


class GainBandit(Bandit):
    """Judged gains against measured costs: net = x · v · (seconds of the next requests) − c.

    v of an arm is the EWMA of the relative gain Δτ / τ of its updates per unit of x, c that of the
    seconds that serving lost by one. Gains are judged on paired texts, so that a version's worth is
    not drowned by the spread between requests.

    An arm that was never rewarded comes first. The paper's ε per request does not do that: within
    the 8 updates of its cold start the other arm's buffer seldom gets the 8 requests that it needs.

    Args:
        schedule, seed: see `Bandit`.
        alpha: of both EWMAs, and of that of the seconds of a request.
        horizon: requests over which an update is to pay for itself.

    Attributes:
        costs: c of each arm, seconds.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        seed: int = 0,
        alpha: float = 0.10,
        horizon: int = 64,
    ) -> None:
        super().__init__(schedule, seed)
        self.alpha, self.horizon = alpha, horizon
        self.costs = dict.fromkeys(self.values, 0.0)
        self._rewarded: set[Action] = set()
        self._triggered: dict[Action, float] = {}
        self._seconds: float | None = None

    def predicted(self, request: FinishedRequest) -> dict[Action, float]:
        future = self.horizon * (self._seconds or 0.0)
        return {
            arm: request.miss_rate * value * future - self.costs[arm]
            if arm in self._rewarded
            else math.inf
            for arm, value in self.values.items()
        }

    def decide(self, request: FinishedRequest) -> Decision:
        before = request.seconds if self._seconds is None else self._seconds
        self._seconds = before + self.alpha * (request.seconds - before)
        return super().decide(request)

    def began(self, action: Action, buffered: list[FinishedRequest]) -> None:
        self._triggered[action] = sum(each.miss_rate for each in buffered) / len(buffered)

    def reward(self, action: Action, gain: float, seconds: float) -> None:
        # The first update says all that is known; from 0 on it would take ten to be believed.
        weight = self.alpha if action in self._rewarded else 1.0
        self._rewarded.add(action)
        rate = self._triggered.get(action, 0.0)
        if rate <= 0:
            return  # no miss was seen: nothing to divide by
        self.values[action] += weight * (gain / rate - self.values[action])
        self.costs[action] += weight * (seconds - self.costs[action])


def _throughput(requests: list[FinishedRequest] | deque[FinishedRequest]) -> float:
    """Φ, tokens per second."""
    return sum(each.tokens for each in requests) / sum(each.seconds for each in requests)
