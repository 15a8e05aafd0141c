"""When to update the drafter, and how much of it: the interface, and policies without a bandit."""

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
    """What a policy knows of a request.

    Attributes:
        misses: s, the drafter's missing probability of the target's tokens, summed over rejected
            positions [SpecBlock, eq. 8].
        steps: target steps with a tree.
        tokens: committed in these steps.
        seconds: from its first step to its last, training included.
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
    """The policy's answer to one request [SpecBlock, Algorithm 1, 9–18].

    Attributes:
        push: the arm whose buffer takes the request.
        update: that buffer is full: train now, and clear it.
        roll_back: return to the last good version first.
        good: the version that served is one to return to later.
    """

    push: Action
    update: bool = False
    roll_back: bool = False
    good: bool = False


class Policy(ABC):
    """Decides after every finished request.

    Attributes:
        gated: a version serves only if the judge finds it better, and the pool may return to an
            earlier one. Otherwise every update serves.
        rejected_only: updates learn from rejected positions of new records alone.
    """

    gated = rejected_only = False

    @abstractmethod
    def decide(self, request: FinishedRequest) -> Decision:
        """Called once for each finished request, in order."""

    def reward(  # noqa: B027
        self, action: Action, gain: float, seconds: float, error: float
    ) -> None:
        """Learn what the last update of an arm was worth, before the next; gated policies only.

        Args:
            gain: judged, Δτ / τ over the version before, on the requests since; NaN: unknown.
            seconds: that serving lost by the update.
            error: standard error of the gain; NaN: unknown.
        """

    def alarm(self) -> None:  # noqa: B027
        """The text or the drafter changed: τ fell far below its mean."""


class Always(Policy):
    """Online Speculative Decoding (arXiv 2310.07177): forward KL on rejected positions, no gate.

    Rate and batches are those that served it best here, not its authors'.
    """

    rejected_only = True

    def __init__(self, action: Action = Action.FULL, every: int = EVERY) -> None:
        self.action, self.every = action, every
        self._buffered = 0

    def decide(self, request: FinishedRequest) -> Decision:
        self._buffered = self._buffered % self.every + 1
        return Decision(self.action, update=self._buffered == self.every)
