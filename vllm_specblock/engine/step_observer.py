"""Observer of an engine's steps; the key `adapt` loads the one in `adapt/`, by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_specblock.committed import CommittedTokens
    from vllm_specblock.engine.metrics.counters import Counts
    from vllm_specblock.engine.runner.step_batch import StepBatch
    from vllm_specblock.feedback.verified_trees import VerifiedTrees

ADAPT = "adapt"
"""Key of `speculative_config`, at the drafter that adapts."""

WARM_UP = ("_warmup_", "_v2_mixed_warmup_")
"""Prefix of vLLM's warm-up request ids."""


class StepObserver:
    """Sees every request of a user and every step; a subclass overrides what it needs."""

    def begin(self, slot: int, request: NewRequestData) -> None:
        """A request begins, new or resumed after a preemption."""

    def end(self, request: str) -> None:
        """A request is finished or preempted."""

    def between_steps(self, slots: np.ndarray) -> None:
        """Called before a step of the requests in `slots`, on its stream."""

    def record(self, rows: StepBatch, committed: CommittedTokens, verified: VerifiedTrees) -> None:
        """Called within a step before its trees are replaced, eagerly or in a graph.

        The last of the `rows.hidden_states` is the input of the LM head.
        """

    def pause(self, slots: np.ndarray) -> None:
        """Drafting is paused for these requests: the step is not recorded."""

    def counts(self) -> Counts:
        """Return metrics; the names never change."""
        return {}


def adaptation(module: str) -> Any:
    """Return a module of `adapt/`: `options` or `serving.observer`."""
    return import_module(f"vllm_specblock.adapt.{module}")
