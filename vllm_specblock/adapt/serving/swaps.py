"""Swaps of versions between two steps, at the same step on all ranks.

Ranks with different weights would verify different trees. So each rank prepares and holds a
version; every 64th turn the ranks compare them, and swap if all hold the same.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from vllm_specblock.adapt.link.folder_link import FolderVersions
from vllm_specblock.adapt.link.staged import StagedVersion
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.serving.refresh import Refresh
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.drafters.specblock.refresh import RefreshError
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.metrics.exporter import LEARNING
from vllm_specblock.engine.ranks import Ranks
from vllm_specblock.engine.step_observer import StepObserver

logger = logging.getLogger("vllm.specblock")

EVERY = 64
"""Turns between two comparisons, each of which costs an all-reduce."""

READS = 3
"""Maximum reads of the current version at start, in case another one is chosen meanwhile."""


class Swaps:
    """Loads the weights that a trainer offers into a drafter.

    Args:
        ranks: ranks with equal drafters, each with its own `Swaps`; None: one rank.
        trainer: stopped with the engine; None: it is external.
    """

    def __init__(
        self,
        link: FolderVersions,
        refresh: Refresh,
        ranks: Ranks | None = None,
        trainer: TrainerProcess | None = None,
    ) -> None:
        self.link, self.refresh, self.ranks, self.trainer = link, refresh, ranks, trainer
        self._coming: StagedVersion | None = None
        self._turns = 0

    def start(self) -> None:
        """Load the current version before the first step, on all ranks."""
        for _ in range(READS):
            self._begin(self.link.current())
            while self._coming is not None and not self.refresh.ready:
                self._advance()
                time.sleep(1e-3)
            if self.ranks is None or self._agree(self.ranks):
                return

    def turn(self) -> None:
        """Continue between two steps, on their stream, without waiting."""
        # A newer version may replace a held one, but not one in preparation.
        if self._coming is None or self.refresh.ready:
            self._begin(self.link.staged())
        self._advance()
        self._turns += 1
        if self.ranks is not None and self._turns % EVERY == 0:
            self._agree(self.ranks)

    def counts(self) -> Counts:
        """Metrics of the trainer and of swaps."""
        counts = self.link.counts
        return {(name, 0): counts.get(name.removeprefix("adapt_"), 0) for name in LEARNING}

    def _begin(self, version: StagedVersion | None) -> None:
        if version is not None:
            self._coming = version
            self.refresh.start(version.tensors, hold=self.ranks is not None)

    def _advance(self) -> None:
        version = self._coming
        if version is None:
            return
        try:
            seconds = self.refresh.turn()
        except RefreshError:
            self._coming = None
            self.link.refuse(version)
            return
        if seconds is None:
            return
        self._coming = None
        self.link.took(version, seconds)
        logger.info(
            "SpecBlock adaptation: version %d (%s, from %d) swapped in in %.1f ms.",
            version.number,
            "heads" if version.action is Action.HEADS else "all",
            version.parent,
            1e3 * seconds,
        )

    def _agree(self, ranks: Ranks) -> bool:
        """Swap if all ranks hold the same version; return whether all hold the same, or none."""
        held = self._coming if self.refresh.ready else None
        alike = ranks.alike(0 if held is None else held.key)  # 0 is no version's key
        if alike and held is not None:
            self.refresh.release()
            self._advance()
        return alike


class FollowingRank(StepObserver):
    """Observer of the other ranks, which only swap: states are equal on all ranks.

    Args:
        swaps: swaps of this rank.
    """

    def __init__(self, swaps: Swaps) -> None:
        self.swaps = swaps

    def between_steps(self, slots: np.ndarray) -> None:
        self.swaps.turn()
