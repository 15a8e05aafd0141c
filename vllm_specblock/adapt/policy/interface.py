"""Interface of adaptation policies, and policies without a bandit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

EVERY = 8
"""Finished requests per update, as in OSD (arXiv 2310.07177)."""


class Action(StrEnum):
    """Parts of the drafter that an update changes (SpecBlock §3.4), by ascending cost."""

    SKIP = "skip"
    HEADS = "heads"
    FULL = "full"


@dataclass(frozen=True)
class FinishedRequest:
    """Statistics of a request for a policy.

    Attributes:
        misses: s, the drafter's missing probability of the target's tokens, summed over rejected
            positions [SpecBlock, eq. 8].
        steps: target steps with a tree; tokens: committed in these steps.
        seconds: time from its first to its last step, including training.
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
        """x = s / steps, which is independent of the answer's length."""
        return self.misses / self.steps

    @property
    def tau(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps


@dataclass(frozen=True)
class Decision:
    """The policy's answer to one request [SpecBlock, Algorithm 1, 9–18].

    Attributes:
        push: the arm whose buffer gets the request.
        update: the buffer is full: train now, and clear it.
        roll_back: restore the last good version first.
        good: mark the version that served as good.
    """

    push: Action
    update: bool = False
    roll_back: bool = False
    good: bool = False


class Policy(ABC):
    """Decides after every finished request.

    Attributes:
        gated: a version serves only if the judge finds it better, and the pool may restore an
            earlier one. Otherwise every update serves.
        rejected_only: train only on rejected positions of new records.
    """

    gated = rejected_only = False

    @abstractmethod
    def decide(self, request: FinishedRequest) -> Decision:
        """Decide about a finished request; called once for each, in order."""

    def reward(  # noqa: B027
        self, action: Action, gain: float, seconds: float, error: float
    ) -> None:
        """Learn the gain of an arm's last update, before the next; gated policies only.

        Args:
            gain: judged Δτ / τ over the previous version, on the requests since; NaN: unknown.
            seconds: serving time lost by the update.
            error: standard error of the gain; NaN: unknown.
        """

    def alarm(self) -> None:  # noqa: B027
        """React to a change of text or drafter: τ fell far below its mean."""


class Always(Policy):
    """Online Speculative Decoding (arXiv 2310.07177): forward KL on rejected positions, no gate.

    Rate and batch size are the best ones measured here, not its authors'.
    """

    rejected_only = True

    def __init__(self, action: Action = Action.FULL, every: int = EVERY) -> None:
        self.action, self.every = action, every
        self._buffered = 0

    def decide(self, request: FinishedRequest) -> Decision:
        self._buffered = self._buffered % self.every + 1
        return Decision(self.action, update=self._buffered == self.every)
