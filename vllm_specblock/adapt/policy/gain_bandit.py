"""The policy `gain`: judged gains of updates against the serving time that they cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from vllm_specblock.adapt.policy.bandit import ALPHA, Bandit, Schedule
from vllm_specblock.adapt.policy.interface import Action, Decision, FinishedRequest

EXPLORING = 0.01
"""Share of serving time for exploration."""

TRIES = 3
"""Exploring updates after a start or an alarm that do not count against that share."""

HORIZON = 64
"""Requests within which an update must pay."""

IN_A_ROW = 15
"""Successive updates of one arm after which another one that may be better gets a turn."""

HOPE = 2.0
"""Optimism in standard deviations: an arm that would not pay even then is not tried."""

FORGOTTEN = 1 / 1024
"""Share of the belief forgotten per request: gains change with the drafter and the texts."""

SPREAD = 0.05
"""Prior spread of a full update's gain, Δτ / τ per missed step: some hundredths in a new domain of
the example pair, none at home."""

SIZE = {Action.HEADS: 0.5, Action.FULL: 1.0}
"""Prior gains relative to a full update; measured for heads: 35 to 66 %."""

TOGETHER = 0.95
"""Correlation of both arms' gains."""

LUCK = 0.02
"""Standard deviation of an update's gain around its arm's, per missed step."""


class GainBelief:
    """Joint normal belief in v of all arms, with Kalman updates.

    The arms' gains are correlated, so an observation of one informs the other.

    Attributes:
        mean: mean of v by arm.
    """

    def __init__(self, arms: Sequence[Action]) -> None:
        self.arms = tuple(arms)
        sizes = SPREAD * np.array([SIZE[arm] for arm in self.arms])
        alike = TOGETHER + (1 - TOGETHER) * np.eye(len(self.arms))
        self._prior = np.outer(sizes, sizes) * alike
        self.reset()

    def reset(self) -> None:
        self.mean = dict.fromkeys(self.arms, 0.0)
        self._covariance = self._prior.copy()

    def spread(self, arm: Action) -> float:
        """Standard deviation of v."""
        index = self.arms.index(arm)
        return math.sqrt(self._covariance[index, index])

    def forget(self, share: float) -> None:
        """Move the belief towards the prior by a share."""
        self.mean = {arm: (1 - share) * mean for arm, mean in self.mean.items()}
        self._covariance += share * (self._prior - self._covariance)

    def learn(self, arm: Action, gain: float, error: float) -> None:
        """Add an arm's gain per missed step, and its standard error (NaN: unknown)."""
        index = self.arms.index(arm)
        noise = LUCK**2 + (self._prior[index, index] if math.isnan(error) else error**2)
        with_arm = self._covariance[index]
        weight = with_arm / (with_arm[index] + noise)
        surprise = gain - self.mean[arm]
        self.mean = {a: self.mean[a] + float(w) * surprise for a, w in zip(self.arms, weight)}
        self._covariance = self._covariance - np.outer(weight, with_arm)


class GainBandit(Bandit):
    """Judged gains against measured costs: worth = x · v · (seconds of the next requests) − c.

    v of an arm is the relative gain Δτ / τ of its updates per unit of x (`GainBelief`), judged on
    requests after an update; c is the serving time lost by one. A worse version does not serve, so
    a negative v costs at most c.

    Exploration of arms that may be best is paid from an account that grows by a share of serving
    time: its cost is bounded, and no arm is given up. Nothing is random. Both arms share one
    buffer; the arm is chosen when it is full.

    Args:
        schedule: only its arms, cooldown and buffer are used.

    Attributes:
        costs: c of each arm, seconds.
        account: seconds available for exploration.
        tries: remaining explorations outside the account.
        in_a_row: latest successive updates of one arm.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        super().__init__(schedule)
        together: list[FinishedRequest] = []
        self._buffers = dict.fromkeys(self.schedule.arms, together)
        self.belief = GainBelief(self.schedule.arms)
        self.costs = dict.fromkeys(self.schedule.arms, 0.0)
        self.account, self.tries = 0.0, TRIES
        self.in_a_row, self._last = 0, Action.SKIP
        self._priced: Counter[Action] = Counter()  # costs that c is the mean of
        self._triggered: dict[Action, float] = {}  # x that an update was made at
        self._seconds: float | None = None

    def worth(self, request: FinishedRequest, hope: float = 0.0) -> dict[Action, float]:
        """Return the worth of each arm's update in seconds, `hope` deviations above the mean."""
        future = request.miss_rate * HORIZON * (self._seconds or 0.0)
        return {
            arm: max(0.0, self.belief.mean[arm] + hope * self.belief.spread(arm)) * future
            - self.costs[arm]
            for arm in self.schedule.arms
        }

    def decide(self, request: FinishedRequest) -> Decision:
        before = request.seconds if self._seconds is None else self._seconds
        self._seconds = before + ALPHA * (request.seconds - before)
        # Bounded, so that a long pause does not fund a burst.
        most = TRIES * max(self.costs.values())
        self.account = min(most, self.account + EXPLORING * request.seconds)
        self.belief.forget(FORGOTTEN)
        return super().decide(request)

    def choose(self, request: FinishedRequest) -> Action:
        """Return the most promising arm if it is believed best, or exploring it is affordable.

        The account is saved for that arm: cheaper trials of heads would use it up.
        """
        arms = tuple(reversed(self.schedule.arms))
        expected, hoped = self.worth(request), self.worth(request, HOPE)
        hopeful, best = max(arms, key=hoped.__getitem__), max(arms, key=expected.__getitem__)
        if hopeful is best and expected[best] > 0 and self.in_a_row >= IN_A_ROW:
            might = [arm for arm in arms if hoped[arm] > expected[best] and arm is not best]
            return max(might, key=hoped.__getitem__, default=best)
        if self.tries or _shortfall(expected, hopeful) <= self.account:
            return hopeful
        return best if expected[best] > 0 else Action.SKIP

    def begin(self, pushed: Action, buffered: list[FinishedRequest]) -> Action:
        together = _together(buffered)
        chosen = self.choose(together)
        action = pushed if chosen is Action.SKIP else chosen
        short = _shortfall(self.worth(together), action)
        if short > self.account:
            self.tries = max(0, self.tries - 1)
        else:
            self.account -= short
        self.in_a_row = 1 + self.in_a_row if action is self._last else 1
        self._last = action
        self._triggered[action] = together.miss_rate
        return action

    def alarm(self) -> None:
        # Gains on earlier texts, or on texts of both domains, are not informative.
        self.belief.reset()
        self._triggered.clear()
        self.account, self.tries = 0.0, TRIES

    def reward(self, action: Action, gain: float, seconds: float, error: float) -> None:
        self._priced[action] += 1
        weight = max(ALPHA, 1 / self._priced[action])  # a plain mean at first
        self.costs[action] += weight * (seconds - self.costs[action])
        rate = self._triggered.pop(action, 0.0)
        if rate > 0 and not math.isnan(gain):
            self.belief.learn(action, gain / rate, error / rate)


def _shortfall(expected: dict[Action, float], arm: Action) -> float:
    """Return by how many seconds an arm is worse than the best choice, including skip."""
    return max(0.0, *expected.values()) - expected[arm]


def _together(requests: list[FinishedRequest]) -> FinishedRequest:
    return FinishedRequest(
        sum(each.misses for each in requests),
        sum(each.steps for each in requests),
        sum(each.tokens for each in requests),
        sum(each.seconds for each in requests),
    )
