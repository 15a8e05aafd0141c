"""Swaps of versions between two steps, at the same step on all ranks.

Ranks with different weights would verify different trees. So each rank prepares and holds a
version; every 64th turn the ranks compare them, and swap if all hold the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from vllm_specblock.adapt.link.folder_link import FolderVersions
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.versions import StagedVersion
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import prepare, swap_in
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
    """Loads the weights that a trainer offers into a drafter; on a GPU a thread prepares them.

    Args:
        ranks: ranks with equal drafters, each with its own `Swaps`; None: one rank.
        trainer: stopped with the engine; None: it is external.
    """

    def __init__(
        self,
        link: FolderVersions,
        drafter: SpecBlockModel,
        ranks: Ranks | None = None,
        trainer: TrainerProcess | None = None,
    ) -> None:
        self.link, self.drafter, self.ranks, self.trainer = link, drafter, ranks, trainer
        on_gpu = drafter.norm.weight.is_cuda
        self._pool = ThreadPoolExecutor(1, "specblock-swaps") if on_gpu else None
        self._coming: StagedVersion | None = None
        self._prepared: Future[nn.Module | None]
        self._held: nn.Module | None = None  # prepared weights of the coming version
        self._seconds = 0.0
        self._turns = 0

    def start(self) -> None:
        """Load the current version before the first step, on all ranks."""
        for _ in range(READS):
            self._begin(self.link.current())
            while self._coming is not None and self._held is None:
                self._advance()
                time.sleep(1e-3)
            if self.ranks is None or self._agree(self.ranks):
                return

    def turn(self) -> None:
        """Continue between two steps, on their stream, without waiting."""
        # A newer version may replace a held one, but not one in preparation.
        if self._coming is None or self._held is not None:
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
        if version is None:
            return
        began = time.perf_counter()
        self._coming, self._held = version, None
        if self._pool is not None:
            pinned = partial(_prepare, pinned=True)
            self._prepared = self._pool.submit(pinned, self.drafter, version.tensors)
        else:
            self._prepared = Future()
            self._prepared.set_result(_prepare(self.drafter, version.tensors))
        self._seconds = time.perf_counter() - began

    def _advance(self) -> None:
        """Hold prepared weights, and let them serve if there is one rank."""
        version = self._coming
        if version is None or self._held is not None or not self._prepared.done():
            return
        self._held = self._prepared.result()
        if self._held is None:
            self._coming = None
            self.link.refuse(version)
        elif self.ranks is None:
            self._swap(version, self._held)

    def _swap(self, version: StagedVersion, fresh: nn.Module) -> None:
        began = time.perf_counter()
        swap_in(self.drafter, fresh)
        self._coming = self._held = None
        seconds = self._seconds + time.perf_counter() - began
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
        version, held = self._coming, self._held
        if version is None or held is None:
            return len({*ranks.gather(0)}) == 1  # no version's key
        alike = len({*ranks.gather(version.key)}) == 1
        if alike:
            self._swap(version, held)
        return alike


def _prepare(
    drafter: SpecBlockModel, tensors: Mapping[str, Tensor], pinned: bool = False
) -> nn.Module | None:
    """Prepare weights, for a GPU in pinned host memory; None: they cannot serve."""
    try:
        if pinned:
            return prepare(drafter, tensors, torch.device("cpu"))._apply(Tensor.pin_memory)
        return prepare(drafter, tensors)
    except Exception:  # a failed update must not stop the engine
        logger.debug("A version is refused.", exc_info=True)
        return None


class FollowingRank(StepObserver):
    """Observer of the other ranks, which only swap: states are equal on all ranks.

    Args:
        swaps: swaps of this rank.
    """

    def __init__(self, swaps: Swaps) -> None:
        self.swaps = swaps

    def between_steps(self, slots: np.ndarray) -> None:
        self.swaps.turn()
