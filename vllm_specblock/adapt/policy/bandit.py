"""Cost-aware bandit (SpecBlock §3.4, A.3, Algorithm 1): buffers, and the policy `paper`."""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass

from vllm_specblock.adapt.policy.interface import EVERY, Action, Decision, FinishedRequest, Policy

ARMS = (Action.HEADS, Action.FULL)

ALPHA = 0.10
"""Weight of a new value in the EWMAs [SpecBlock, eq. 10]."""

INTERVAL = 8
"""N, requests of a measurement and of a window of τ [SpecBlock, A.3]."""

LEAST_SIGNAL = 5.0
"""s_min [SpecBlock, A.3]: updates below it are not measured."""


@dataclass(frozen=True)
class Schedule:
    """Schedule of training and exploration; the defaults are the paper's (A.3).

    Attributes:
        warm_up: requests before the first is pushed.
        cold_start: updates during which an arm is always chosen.
        epsilon: share of exploring requests, linear from the first cold-start update to the last.
        cooldown: requests without an update after one.
        buffer: requests of an update.
        explore_every: after the cold start, one request in this many may explore, with the last
            `epsilon`. Our addition: without it, a bandit that skips never trains again.
        least, largest: smallest and largest arm.
    """

    warm_up: int = 10
    cold_start: int = 8
    epsilon: tuple[float, float] = (0.30, 0.10)
    cooldown: int = 2
    buffer: int = EVERY
    explore_every: int = 64
    least: Action = Action.HEADS
    largest: Action = Action.FULL

    @property
    def arms(self) -> tuple[Action, ...]:
        return ARMS[ARMS.index(self.least) : ARMS.index(self.largest) + 1]


class Bandit(Policy):
    """Buffers and cooldown of A.3; `events` counts updates."""

    gated = True

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule or Schedule()
        self.events = self._blocked = 0
        self._buffers: dict[Action, list[FinishedRequest]] = {a: [] for a in self.schedule.arms}

    @abstractmethod
    def choose(self, request: FinishedRequest) -> Action:
        """Return the arm of a request."""

    @abstractmethod
    def begin(self, pushed: Action, buffered: list[FinishedRequest]) -> Action:
        """Begin an update with these requests, of which the last filled the buffer of arm `pushed`;
        return the arm of the update."""

    def decide(self, request: FinishedRequest) -> Decision:
        blocked = self._blocked > 0
        self._blocked = max(0, self._blocked - 1)
        action = self.choose(request)
        if action is Action.SKIP:
            return Decision(action)
        buffered = self._buffers[action]
        buffered.append(request)
        if blocked or len(buffered) < self.schedule.buffer:
            return Decision(action)
        full = list(buffered)
        buffered.clear()
        self._blocked, self.events = self.schedule.cooldown, self.events + 1
        return Decision(self.begin(action, full), update=True)


class PaperBandit(Bandit):
    """Algorithm 1 as printed, with its rollback.

    Δ_tp of an update is the relative throughput gain from the N requests before it to the N after.
    A new update within that interval replaces it.

    Args:
        seed: of the exploration.

    Attributes:
        values: v of each arm.
    """

    gated = False

    def __init__(self, schedule: Schedule | None = None, seed: int = 0) -> None:
        super().__init__(schedule)
        self.values = dict.fromkeys(self.schedule.arms, 0.0)
        self._draw, self._seen = random.Random(seed), 0
        self._exploring: Action | None = None  # until an update of this arm
        self._alarmed = False
        self._recent: list[FinishedRequest] = []
        self._trigger: tuple[Action, float, float] | None = None  # arm, s_trig, tokens/s before
        self._after: list[FinishedRequest] = []
        self._window: list[FinishedRequest] = []
        self._taus: list[float] = []

    @property
    def epsilon(self) -> float:
        first, last = self.schedule.epsilon
        return first + (last - first) * min(1.0, self.events / self.schedule.cold_start)

    def alarm(self) -> None:
        self._alarmed = True

    def choose(self, request: FinishedRequest) -> Action:
        if self._seen <= self.schedule.warm_up:
            return Action.SKIP
        # Δ̂ of eq. 9; the cheaper of equals.
        predicted = {arm: request.misses * value for arm, value in self.values.items()}
        best = max(self.schedule.arms, key=predicted.__getitem__)
        if self.events < self.schedule.cold_start:
            self._alarmed = False  # it is exploring already
            explores = self._draw.random() < self.epsilon
            return self._draw.choice(self.schedule.arms) if explores else best
        self._consider_exploring()
        if self._exploring is not None:
            return self._exploring
        return best if predicted[best] > 0 else Action.SKIP

    def _consider_exploring(self) -> None:
        # Explore for a whole update: single requests would not fill a buffer.
        due = self._seen % self.schedule.explore_every == 0
        if self._alarmed or (due and self._draw.random() < self.epsilon):
            self._alarmed = False
            self._exploring = self._exploring or self._draw.choice(self.schedule.arms)

    def decide(self, request: FinishedRequest) -> Decision:
        self._seen += 1
        self._recent = [*self._recent, request][-INTERVAL:]
        self._measure(request)
        falls, good = self._close_window(request)
        if falls:
            self.values = dict.fromkeys(self.values, 0.0)
            self._taus.clear()
            self._trigger = None  # what is measured now is another version
        decision = super().decide(request)
        return Decision(decision.push, decision.update, falls, good)

    def begin(self, pushed: Action, buffered: list[FinishedRequest]) -> Action:
        if self._exploring is pushed:
            self._exploring = None
        self._trigger = pushed, buffered[-1].misses, _throughput(self._recent)
        self._after = []
        return pushed

    def _measure(self, request: FinishedRequest) -> None:
        if self._trigger is None:
            return
        self._after.append(request)
        if len(self._after) < INTERVAL:
            return
        (action, signal, before), self._trigger = self._trigger, None
        if signal >= LEAST_SIGNAL:
            gain = _throughput(self._after) / before - 1
            self.values[action] += ALPHA * (gain / signal - self.values[action])

    def _close_window(self, request: FinishedRequest) -> tuple[bool, bool]:
        """(τ fell over three windows in a row, it did not fall over the last two)."""
        self._window.append(request)
        if len(self._window) < INTERVAL:
            return False, False
        window, self._window = self._window, []
        tau = sum(each.tokens for each in window) / sum(each.steps for each in window)
        good = not self._taus or tau >= self._taus[-1]
        self._taus = [*self._taus[-2:], tau]
        three = len(self._taus) == 3
        return three and self._taus[0] > self._taus[1] > self._taus[2], good


def _throughput(requests: list[FinishedRequest]) -> float:
    """Φ, tokens per second."""
    return sum(each.tokens for each in requests) / sum(each.seconds for each in requests)
