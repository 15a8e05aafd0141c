"""Swaps of versions between two steps, on all ranks in the same one.

Ranks that draft with different weights would verify different trees. So each rank prepares a
version and holds it; in every 64th turn all compare what they hold, and serve what all hold.
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
"""Turns from one agreement to the next: it costs a message to and from every rank."""

READS = 3
"""Reads of the current version at a start, should another one be chosen meanwhile."""


class Swaps:
    """Gives a drafter the weights that its trainer offers.

    Args:
        ranks: that draft alike, each with one of these; None: there is one.
        trainer: that ends with the engine; None: it is elsewhere.
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
        """Let what is current serve from the first step on, at load, on all ranks."""
        for _ in range(READS):
            self._begin(self.link.current())
            while self._coming is not None and not self.refresh.ready:
                self._advance()
                time.sleep(1e-3)
            if self.ranks is None or self._agree(self.ranks):
                return

    def turn(self) -> None:
        """Between two steps, on their stream: do what can be done without waiting."""
        # What is on its way cannot be given up; what is held can, for what is newer.
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
        """Serve what is held if all ranks hold it; return whether all hold the same, or nothing."""
        held = self._coming if self.refresh.ready else None
        alike = ranks.alike(0 if held is None else held.key)  # 0 is no version's key
        if alike and held is not None:
            self.refresh.release()
            self._advance()
        return alike


class FollowingRank(StepObserver):
    """The observer of ranks beside the first: states are whole on every rank, so one records them.

    Args:
        swaps: of this rank.
    """

    def __init__(self, swaps: Swaps) -> None:
        self.swaps = swaps

    def between_steps(self, slots: np.ndarray) -> None:
        self.swaps.turn()
