"""The rule `gain`: judged gains of updates against the seconds that they take from serving."""

from __future__ import annotations

import math
from collections import Counter

from vllm_specblock.adapt.policy.bandit import Bandit, Schedule
from vllm_specblock.adapt.policy.interface import Action, Decision, FinishedRequest

SHARE_OF_HEADS = 0.5
"""Of a full update's gain that one of heads is taken to bring until it was tried: between 35 and
66 % were measured."""


class GainBandit(Bandit):
    """Judged gains against measured costs: net = x · v · (seconds of the next requests) − c.

    v of an arm is the relative gain Δτ / τ of its updates per unit of x, c the seconds that serving
    lost by one: means of the first 1 / α updates, then EWMAs. A gain is judged on the requests
    after its update, whose texts nothing was trained on: so the spread between requests does not
    drown it, and behind a change of domain it is that of the new one.

    Both arms learn from the same records, so there is one buffer: its requests decide together,
    when it is full, which arm the update is of, and ε is drawn then. Two buffers would only split
    the count of requests, and make updates late where they matter most: behind a change of domain
    requests of one kind fill the one and those of another kind the other.

    The larger arm comes first, for it learns what heads do, too; heads are tried where they might
    do for less. An alarm says that the text is another one: then the gains of before say nothing.

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
        together: list[FinishedRequest] = []
        self._buffers = dict.fromkeys(self.schedule.arms, together)
        self._known: Counter[Action] = Counter()  # rewards that v is the mean of
        self._priced: Counter[Action] = Counter()  # and c
        self._triggered: dict[Action, float] = {}
        self._seconds: float | None = None

    def predicted(self, request: FinishedRequest) -> dict[Action, float]:
        future = request.miss_rate * self.horizon * (self._seconds or 0.0)
        largest = self.schedule.largest
        worth = {}
        for arm, value in self.values.items():
            if self._known[arm]:
                worth[arm] = value * future - self.costs[arm]
            elif arm is largest or not self._known[largest]:
                worth[arm] = math.inf
            else:
                worth[arm] = SHARE_OF_HEADS * self.values[largest] * future - self.costs[arm]
        return worth

    def decide(self, request: FinishedRequest) -> Decision:
        before = request.seconds if self._seconds is None else self._seconds
        self._seconds = before + self.alpha * (request.seconds - before)
        return super().decide(request)

    def arm_of(self, pushed: Action, buffered: list[FinishedRequest]) -> Action:
        if self._exploring is not None:
            return self._exploring
        together = FinishedRequest(
            sum(each.misses for each in buffered),
            sum(each.steps for each in buffered),
            sum(each.tokens for each in buffered),
            sum(each.seconds for each in buffered),
        )
        best, _ = self._best(together)
        return self._explored(best) if self.events < self.schedule.cold_start else best

    def alarm(self) -> None:
        self._known.clear()  # so both arms are worth an update, however little they gained before

    def began(self, action: Action, buffered: list[FinishedRequest]) -> None:
        self._triggered[action] = sum(each.miss_rate for each in buffered) / len(buffered)

    def reward(self, action: Action, gain: float, seconds: float) -> None:
        self._priced[action] += 1
        self.costs[action] += self._weight(self._priced[action]) * (seconds - self.costs[action])
        rate = self._triggered.get(action, 0.0)
        if rate <= 0 or math.isnan(gain):
            return  # no miss was seen, or no text: nothing to learn
        self._known[action] += 1
        self.values[action] += self._weight(self._known[action]) * (
            gain / rate - self.values[action]
        )

    def _choose(self, request: FinishedRequest) -> Action:
        if self.events < self.schedule.cold_start:
            return self._best(request)[0]  # whether another arm is explored shows when it is full
        return super()._choose(request)

    def _best(self, request: FinishedRequest) -> tuple[Action, float]:
        """Of equals the larger: nothing is known of both."""
        predicted = self.predicted(request)
        best = max(reversed(self.schedule.arms), key=lambda arm: predicted[arm])
        return best, predicted[best]

    def _weight(self, count: int) -> float:
        """Of the newest of so many rewards: from 0 on an EWMA would take ten to be believed."""
        return max(self.alpha, 1 / count)
