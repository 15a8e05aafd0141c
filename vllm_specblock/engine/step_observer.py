"""What may watch an engine's steps, and the one that the key `adapt` asks for.

The engine never imports `adapt/`: it is found here by name, where the key is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData

    from vllm_specblock.drafters.interface import CommittedTokens, Drafter
    from vllm_specblock.engine.config.resolved_config import ResolvedConfig
    from vllm_specblock.engine.metrics.counters import Counts
    from vllm_specblock.engine.runner.step_batch import StepBatch
    from vllm_specblock.feedback.verified_trees import VerifiedTrees

ADAPT = "adapt"
"""Key of `speculative_config`, at the drafter that adapts."""


class StepObserver:
    """Sees every request and every step; a subclass overrides what it needs.

    Attributes:
        warming_up: new requests are vLLM's own dummies.
    """

    warming_up = False

    def begin(self, slot: int, request: NewRequestData) -> None:
        """A request comes, new or resumed after a preemption."""

    def end(self, request: str) -> None:
        """A request is finished or preempted."""

    def between_steps(self, slots: np.ndarray) -> None:
        """Called before a step of the requests in `slots`, on its stream."""

    def record(
        self,
        rows: StepBatch,
        committed: CommittedTokens,
        hidden_states: list[torch.Tensor] | torch.Tensor,
        verified: VerifiedTrees,
    ) -> None:
        """Called within a step before its trees are replaced, eagerly or in a graph.

        Args:
            hidden_states: [batch rows, Ht] for each layer that drafters read; the input of the LM
                head comes last.
        """

    def pause(self, slots: np.ndarray) -> None:
        """Drafting is paused for these requests: the step is not recorded."""

    def counts(self) -> Counts:
        """Return metrics; the names never change."""
        return {}


def adaptation(module: str) -> Any:
    """Return a module of `adapt/`: `options`, `check` or `serving.observer`."""
    return import_module(f"vllm_specblock.adapt.{module}")


def make_observer(
    config: VllmConfig,
    resolved: ResolvedConfig,
    drafters: Sequence[Drafter],
    parent: torch.Tensor,
    max_depth: int,
) -> StepObserver | None:
    """Return what watches an engine's steps; None: no drafter adapts.

    Args:
        drafters: of the plan, loaded.
        parent: [S, N] int32, of the trees under verification.
        max_depth: D, the deepest path.
    """
    if resolved.adapting is None:
        return None
    make = adaptation("serving.observer").make_observer
    observer: StepObserver | None = make(config, resolved, drafters, parent, max_depth)
    return observer
