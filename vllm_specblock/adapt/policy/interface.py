"""When to update the drafter, and how much of it: the interface, and the policies without a bandit.

Every finished request goes to the policy, which answers with the arm whose buffer takes it. A full
buffer is an update [SpecBlock, Algorithm 1, 9–18].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

EVERY = 8
"""Finished requests that make an update, as OSD has it (arXiv 2310.07177)."""


class Action(StrEnum):
    """What an update may change (SpecBlock §3.4), in ascending order of cost."""

    SKIP = "skip"
    HEADS = "heads"
    FULL = "full"


@dataclass(frozen=True)
class FinishedRequest:
    """What a request says to the policy.

    Attributes:
        misses: s, the drafter's missing probability of the target's tokens, summed over rejected
            positions [SpecBlock, eq. 8].
        steps: target steps with a tree.
        tokens: committed in these steps.
        seconds: from its first step to its last, with whatever training took from serving.

    Raises:
        ValueError: there is no step, or no time passed.
    """

    misses: float
    steps: int
    tokens: int
    seconds: float

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.seconds > 0:
            raise ValueError(
                f"A finished request has a step and takes time, but this one has {self.steps} "
                f"steps in {self.seconds} seconds."
            )

    @property
    def miss_rate(self) -> float:
        """x = s / steps: unlike s it does not grow with the answer's length."""
        return self.misses / self.steps

    @property
    def tau(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps


@dataclass(frozen=True)
class Decision:
    """The policy's answer to one request.

    Attributes:
        push: the arm whose buffer takes the request.
        update: that buffer is full: train now, and clear it.
        roll_back: return to the last good version first.
        good: the version that served is a good one, to return to later.
    """

    push: Action
    update: bool = False
    roll_back: bool = False
    good: bool = False


class Policy(ABC):
    """Decides after every finished request.

    Attributes:
        records: requests are to be recorded at all.
        trains: there are updates at all, and versions that come of them.
        gated: a version serves only if the judge finds it better, and the pool may return to an
            earlier one. Otherwise every update serves.
        rejected_only: its updates learn from rejected positions of new records, and rehearse none.
    """

    records = trains = True
    gated = rejected_only = False

    @property
    def judges(self) -> bool:
        """The version in use is held against others on every recorded request."""
        return self.gated

    @abstractmethod
    def decide(self, request: FinishedRequest) -> Decision:
        """Called once for each finished request, in their order."""

    def reward(  # noqa: B027
        self, action: Action, gain: float, seconds: float, error: float
    ) -> None:
        """What the last update of an arm was worth; told to gated policies, before the next.

        Args:
            action: the arm.
            gain: judged, Δτ / τ against the version that it began from, on the requests since; NaN
                where there was no text to judge by.
            seconds: that serving lost by it.
            error: standard error of the gain; NaN below two texts.
        """

    def alarm(self) -> None:  # noqa: B027
        """The text or the drafter changed: τ fell far below its mean."""


class Frozen(Policy):
    """Nothing is recorded, nothing is learned."""

    records = trains = False

    def decide(self, request: FinishedRequest) -> Decision:
        return Decision(Action.SKIP)


class Watch(Frozen):
    """Records, and judges a version that somebody else chose; never trains, and nothing is swapped:
    what adaptation costs, and what a version would gain."""

    records = True

    @property
    def judges(self) -> bool:
        return True


class Fixed(Policy):
    """One arm, every so many requests.

    Args:
        action: the arm.
        every: requests.
        gated: see `Policy`.

    Raises:
        ValueError: `every` is below 1, or the arm is to skip.
    """

    def __init__(
        self, action: Action = Action.FULL, every: int = EVERY, gated: bool = True
    ) -> None:
        if every < 1 or action is Action.SKIP:
            raise ValueError(
                f"A fixed policy updates heads or full every 1 request or more, but not {action} "
                f"every {every}."
            )
        self.action, self.every, self.gated = action, every, gated
        self._buffered = 0

    def decide(self, request: FinishedRequest) -> Decision:
        self._buffered = self._buffered % self.every + 1
        return Decision(self.action, update=self._buffered == self.every)


class Always(Fixed):
    """Online Speculative Decoding (arXiv 2310.07177) as others are compared with it.

    One arm every so many requests, forward KL on what was rejected of them and on nothing else, no
    gate. Its rate and batches are those that served it best here, not its authors'.
    """

    rejected_only = True

    def __init__(self, action: Action = Action.FULL, every: int = EVERY) -> None:
        super().__init__(action, every, gated=False)
