"""The versions that a folder says are to serve, as whoever serves them finds them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque

from vllm_specblock.adapt.link.layout import COUNTS
from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.link.stored import stored_version
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")

LOOK = 1.0
"""Seconds between two looks for another version."""


class FolderVersions:
    """Reads what is current in a folder; the same methods as `SharedVersions`.

    Args:
        versions: what a trainer or a person writes. What it says at once is there for `staged`.
    """

    def __init__(self, versions: VersionFolder) -> None:
        self.versions, self.tally = versions, Counter[str]()
        self._found: deque[StagedVersion] = deque(maxlen=1)
        self._seen = self._serves = 0  # stamp and number of the choice that was looked at last
        self._ends = threading.Event()
        self._look()

    def staged(self) -> StagedVersion | None:
        """See `SharedVersions.staged`; always of all weights."""
        return self._found.popleft() if self._found else None

    def current(self) -> StagedVersion | None:
        """Look at once: as `staged`."""
        self._look()
        return self.staged()

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        """See `SharedVersions.took`."""
        self.tally["swaps"] += 1
        self.tally["swap_microseconds"] += round(1e6 * seconds)

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        """See `SharedVersions.refuse`."""
        self.tally[f"versions_refused_{reason.replace(' ', '_')}"] += 1

    @property
    def counts(self) -> dict[str, int]:
        """By `layout.COUNTS`; what the trainer counts, the other end says when it ends."""
        return {name: self.tally[name] for name in COUNTS}

    def _look(self) -> None:
        stamp = self.versions.stamp()
        if stamp == self._seen:
            return
        try:
            found = stored_version(self.versions)
        except TrainError as error:
            self._seen = stamp
            self.tally["versions_refused_checksum"] += 1
            logger.warning("SpecBlock adaptation: %s", error)
            return
        # None: it was removed meanwhile for another, which the next look finds.
        if found is not None:
            self._seen = stamp
            if found.number != self._serves:
                self._serves = found.number
                self._found.append(found)


class RankFolder(FolderVersions):
    """The end of a rank beside the first one, which has the folder's lock: a thread looks."""

    def __init__(self, versions: VersionFolder) -> None:
        super().__init__(versions)
        threading.Thread(target=self._run, daemon=True, name="specblock-adapt").start()

    def close(self) -> None:
        """Look no more."""
        self._ends.set()

    def _run(self) -> None:
        while not self._ends.wait(LOOK):
            self._look()
