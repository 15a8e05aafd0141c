"""The versions that a trainer stages in shared memory, as whoever serves them finds them."""

from __future__ import annotations

import os
import threading
from collections import Counter

from vllm_specblock.adapt.link.layout import COUNTS, Shared
from vllm_specblock.adapt.link.shared import SharedMemory
from vllm_specblock.adapt.link.staging import Shapes, StagedVersion
from vllm_specblock.train.config import TrainError


class SharedVersions:
    """Reads what is staged, beside the steps. For one thread.

    Args:
        shared: the memory.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._taken = 0  # sequence number of the version that serves
        self._examined = 0  # of the last version that was looked at
        self._reader: threading.Thread | None = None
        self._found: StagedVersion | None = None

    def staged(self) -> StagedVersion | None:
        """The newest version that the trainer offers, each once.

        Copying and checking it takes a thread of its own some moments: until then None. What is
        torn or not finite is refused and counted.
        """
        found = self._found
        if found is not None:  # so no thread is about to put another one there
            self._found = None
            return found
        if self._reader is not None and self._reader.is_alive():
            return None
        sequence = self._shared.staging.sequence
        if sequence % 2 == 0 and sequence > self._examined:
            self._reader = threading.Thread(target=self._read, daemon=True, name="specblock-adapt")
            self._reader.start()
        return None

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        """A version serves from now on.

        Args:
            version: from `staged`.
            seconds: that serving lost by the swap.
        """
        self._taken = version.sequence
        self.count("swaps")
        self.count("swap_microseconds", round(1e6 * seconds))

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        """A version cannot serve: `not finite` in the dtype that serves, or a wrong `checksum`."""
        self.count(f"versions_refused_{reason.replace(' ', '_')}")

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of `COUNTS`."""
        self._shared.count(name, by)

    def _read(self) -> None:
        staging = self._shared.staging
        sequence = staging.sequence
        found = staging.read(after=self._taken)
        if found is None:
            return  # it is being replaced: looked at again when that is done
        if isinstance(found, str):
            self._examined = sequence
            self.count(f"versions_refused_{found.replace(' ', '_')}")
            return
        self._examined, self._found = found.sequence, found


class RankLink(SharedVersions):
    """The end of a rank beside the first one, which reads that one's memory.

    It writes nothing there: all numbers in it have a writer already.

    Args:
        process: id of the first rank, of the same user on this machine.
        descriptor: of its memory.
        shapes: of the drafter's parameters.

    Raises:
        TrainError: the memory cannot be opened.
    """

    def __init__(self, process: int, descriptor: int, shapes: Shapes) -> None:
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TrainError(
                f"The versions of the first rank cannot be read by another one, since {path} "
                f"cannot be opened ({error.strerror}): drop adapt, or tensor_parallel_size."
            ) from None
        super().__init__(Shared(SharedMemory(descriptor=opened), shapes))
        os.close(opened)  # it is mapped
        self.tally = Counter[str]()

    def count(self, name: str, by: int = 1) -> None:
        """For this rank alone."""
        self.tally[name] += by

    @property
    def counts(self) -> dict[str, int]:
        """By `COUNTS`, of this rank alone."""
        return {name: self.tally[name] for name in COUNTS}
