"""The rule `gain`: judged gains of updates against the seconds that they take from serving."""

from __future__ import annotations

import math
from collections import Counter

from vllm_specblock.adapt.policy.bandit import Bandit, Schedule
from vllm_specblock.adapt.policy.gain_belief import GainBelief
from vllm_specblock.adapt.policy.interface import Action, Decision, FinishedRequest

EXPLORING = 0.01
"""Share of serving's time for updates that are not expected to pay."""

TRIES = 3
"""Such updates after a start or an alarm, at any cost: what updates gain has to be seen."""

IN_A_ROW = 15
"""Updates of one arm that pays, after which another arm that might be better has a turn at any
cost: an arm that is forgotten as fast as it is learned would keep all turns."""

HOPE = 2.0
"""Standard deviations above the mean belief that an arm may gain; one that would not pay even then
is not tried."""

FORGOTTEN = 1 / 1024
"""Share of the belief that each request takes away: gains shrink while a drafter learns, and grow
with other texts."""


class GainBandit(Bandit):
    """Judged gains against measured costs: worth = x · v · (seconds of the next requests) − c.

    v of an arm is the relative gain Δτ / τ of its updates per unit of x (`GainBelief`), judged on
    the requests after an update, whose texts it did not learn from; c the seconds that serving lost
    by one. A version that is worse does not serve, so a negative v costs no more than c.

    An arm that might be the best though it is not believed to be is tried, paid from an account
    that grows by a share of serving's time: the loss is bounded, and no arm is given up for good.
    Nothing is random. Both arms share one buffer, whose requests choose the arm when it is full.

    Args:
        schedule: of which only cooldown, buffer and largest count.
        alpha: of the EWMAs of costs and of a request's seconds.
        horizon: requests over which an update is to pay for itself.

    Attributes:
        belief: in v of each arm.
        costs: c of each arm, seconds.
        account: seconds that exploring may take now.
        tries: updates that may explore without the account.
        in_a_row: updates of one arm, the last ones.
    """

    def __init__(
        self, schedule: Schedule | None = None, alpha: float = 0.10, horizon: int = 64
    ) -> None:
        super().__init__(schedule)
        self.alpha, self.horizon = alpha, horizon
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
        """Return seconds that an update of each arm is worth, `hope` standard deviations above the
        mean belief."""
        future = request.miss_rate * self.horizon * (self._seconds or 0.0)
        return {
            arm: max(0.0, self.belief.mean[arm] + hope * self.belief.spread(arm)) * future
            - self.costs[arm]
            for arm in self.schedule.arms
        }

    def decide(self, request: FinishedRequest) -> Decision:
        before = request.seconds if self._seconds is None else self._seconds
        self._seconds = before + self.alpha * (request.seconds - before)
        # Bounded: what a long rest saves is not spent at once after it.
        most = TRIES * max(self.costs.values())
        self.account = min(most, self.account + EXPLORING * request.seconds)
        self.belief.forget(FORGOTTEN)
        return super().decide(request)

    def choose(self, request: FinishedRequest) -> Action:
        """Return the most hopeful arm, if it is believed to be the best or exploring may cost that.

        Until then the account is saved for it: tries of heads, which are cheaper and teach less,
        would use up what is to pay for all weights.
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

    def arm_of(self, pushed: Action, buffered: list[FinishedRequest]) -> Action:
        chosen = self.choose(_together(buffered))
        return pushed if chosen is Action.SKIP else chosen

    def began(self, action: Action, buffered: list[FinishedRequest]) -> None:
        together = _together(buffered)
        short = _shortfall(self.worth(together), action)
        if short > self.account:
            self.tries = max(0, self.tries - 1)
        else:
            self.account -= short
        self.in_a_row = 1 + self.in_a_row if action is self._last else 1
        self._last = action
        self._triggered[action] = together.miss_rate

    def alarm(self) -> None:
        # Gains of other texts, and of an update judged on texts of both kinds, say nothing.
        self.belief.reset()
        self._triggered.clear()
        self.account, self.tries = 0.0, TRIES

    def reward(self, action: Action, gain: float, seconds: float, error: float) -> None:
        self._priced[action] += 1
        weight = max(self.alpha, 1 / self._priced[action])  # a plain mean at first
        self.costs[action] += weight * (seconds - self.costs[action])
        rate = self._triggered.pop(action, 0.0)
        if rate > 0 and not math.isnan(gain):
            self.belief.learn(action, gain / rate, error / rate)


def _shortfall(expected: dict[Action, float], arm: Action) -> float:
    """Seconds by which an arm is worth less than the best choice, which may be to skip."""
    return max(0.0, *expected.values()) - expected[arm]


def _together(requests: list[FinishedRequest]) -> FinishedRequest:
    return FinishedRequest(
        sum(each.misses for each in requests),
        sum(each.steps for each in requests),
        sum(each.tokens for each in requests),
        sum(each.seconds for each in requests),
    )
