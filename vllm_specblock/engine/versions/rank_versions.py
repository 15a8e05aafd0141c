"""The same version on all ranks from the same step on.

All ranks of a tensor-parallel engine draft alike and each verifies what it drafted itself, so one
that swapped a step before another would feed the target other tokens than that one. Each makes
ready by itself what it finds staged, and holds it. All count the same turns; in every 64th they say
what they hold, and where all hold the same it serves on all of them from that turn on. Nobody waits
for anything else, and a version that one rank does not have, or has refused, serves on none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.drafters.specblock.refresh import Refresh
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.runner.recording import Turning
from vllm_specblock.engine.versions.drafter_versions import Arrival, Versions
from vllm_specblock.engine.versions.ranks import Ranks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData

EVERY = 64
"""Turns from one agreement to the next: it costs a message to and from every rank."""

READS = 3
"""Times that ranks read what is current when they start, should they have read different choices:
the first agreement has brought them together, so the next time they read at one moment."""


class RankVersions:
    """Gives the drafters of all ranks the weights that one trainer offers.

    Args:
        versions: this rank's drafter, and the link at which it finds versions.
        ranks: all of them have one of these.
        refresh: of the drafter.
    """

    def __init__(self, versions: Versions, ranks: Ranks, refresh: Refresh) -> None:
        self.versions, self.ranks = versions, ranks
        self.link, self.trainer = versions.link, versions.trainer
        self._arrival = Arrival(versions, refresh)
        self._turns = 0

    def turn(self) -> None:
        """Between two steps, on the stream on which they run."""
        # What is on its way cannot be given up; what is held can, for what is newer.
        if self._arrival.version is None or self._arrival.refresh.ready:
            self._hold(self.link.staged())
        self._arrival.turn()
        self._turns += 1
        if self._turns % EVERY == 0:
            self._agree()

    def start(self, current: Callable[[], StagedVersion | None]) -> None:
        """At load, on all ranks: what is current serves from the first step on.

        Should they not have found the same, because somebody chose another meanwhile, or because
        one of them refused it, they begin with the drafter as delivered.

        Args:
            current: finds it, if it was not found before.
        """
        for _ in range(READS):
            self._hold(current())
            while self._arrival.version is not None and not self._arrival.refresh.ready:
                self._arrival.turn()
                time.sleep(1e-3)
            if self._agree():
                return

    def counts(self) -> Counts:
        """See `Versions.counts`."""
        return self.versions.counts()

    def _hold(self, found: StagedVersion | None) -> None:
        if found is not None:
            self._arrival.start(found, hold=True)

    def _agree(self) -> bool:
        """With all ranks: let what is held serve if all hold it.

        Returns:
            whether all hold the same, or none holds anything.
        """
        held = self._arrival.version if self._arrival.refresh.ready else None
        # 0 is no version's key.
        alike = self.ranks.alike(0 if held is None else held.key)
        if alike and held is not None:
            self._arrival.refresh.release()
            self._arrival.turn()
        return alike


class FollowingRank:
    """What ranks beside the first have in a recorder's place: states are whole on every rank, so
    one records them, and the others only take versions in its turns.

    Args:
        versions: of this rank.
    """

    def __init__(self, versions: Turning) -> None:
        self.versions = versions
        self.warming_up = False

    def begin(self, slot: int, request: NewRequestData) -> None:
        """See `Recorder`."""

    def end(self, request: str) -> None:
        """See `Recorder`."""

    def turn(self, slots: np.ndarray) -> None:
        """Before a step, as the first rank does."""
        self.versions.turn()

    def record(self, *args: Any) -> None:
        """See `Recorder`."""

    def pause(self, slots: np.ndarray) -> None:
        """See `Recorder`."""

    def counts(self) -> Counts:
        """Of this rank; the metrics are the first one's."""
        return self.versions.counts()
