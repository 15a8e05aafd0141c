"""A folder between an engine and a trainer elsewhere: requests as files, versions as folders.

User text lies in these files: the folder's mode is 0700, theirs 0600, and they are deleted when
read.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.files import lock_folder, private_folder
from vllm_specblock.adapt.link import wire
from vllm_specblock.adapt.link.folder_versions import LOOK, FolderVersions
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")

VERSIONS = "versions"
"""Where in the folder versions lie, if they are not given another."""

_STEM, _END = "request-", ".rows"


class FolderLink(FolderVersions):
    """The engine's end; the same methods as `EngineLink`, and no more waiting: a thread writes.

    Args:
        folder: for requests; made if it is not there.
        versions: what the trainer writes. What it says at once is there for `staged`.
        memory: MiB of requests that may lie in the folder; what comes then is not taken.
        slots: requests that may wait to be written.

    Raises:
        TrainError: the folder cannot be used, or another engine writes to it.
    """

    def __init__(
        self, folder: Path, versions: VersionFolder, memory: float = 512, slots: int = 16
    ) -> None:
        private_folder(folder)
        self._lock = lock_folder(folder)
        for left in folder.glob(f".{_STEM}*"):  # of an engine that was killed: users' text
            left.unlink(missing_ok=True)
        logger.warning(
            "SpecBlock adaptation: rows of users' requests are written to %s, from which their "
            "text can be read; specblock adapt run deletes them.",
            folder,
        )
        super().__init__(versions)
        self.folder, self.room = folder, int(memory * (1 << 20))
        self._waiting: queue.Queue[wire.Finished] = queue.Queue(slots)
        self._full, self._largest = False, 0
        self._written = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="specblock-adapt")
        self._thread.start()

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool:
        """See `EngineLink.offer`."""
        if self._full:
            return False
        try:
            self._waiting.put_nowait(wire.Finished(record, finished))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Write what waits, and leave the folder to others."""
        self._ends.set()
        self._thread.join(timeout=10)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _run(self) -> None:
        looked = 0.0
        while True:
            ending = self._ends.is_set()
            try:
                self._write(self._waiting.get(timeout=0.05))
            except queue.Empty:
                if ending:
                    return
            except OSError as error:
                self.tally["dropped_records"] += 1
                logger.debug("A request could not be written to %s: %s", self.folder, error)
            if not ending and time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                self._full = self._size() + self._largest > self.room
                self._look()

    def _write(self, message: wire.Finished) -> None:
        packed = wire.pack(message)
        self._largest = max(self._largest, len(packed or ()))
        if packed is None or self._size() + len(packed) > self.room:
            # It was taken already: the folder filled up while it waited.
            self._full = packed is not None
            self.tally["dropped_records"] += 1
            return
        self._written += 1
        name = f"{_STEM}{time.time_ns():020d}-{os.getpid()}-{self._written}{_END}"
        aside = self.folder / f".{name}"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(packed)
        aside.rename(self.folder / name)

    def _size(self) -> int:
        """Bytes of the requests that lie in the folder."""
        size = 0
        for path in self.folder.glob(f"{_STEM}*{_END}"):
            with suppress(FileNotFoundError):  # read meanwhile
                size += path.stat().st_size
        return size


class FolderSource:
    """The trainer's end of requests.

    Args:
        folder: where the engine writes.

    Raises:
        TrainError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise TrainError(
                f"There is no folder {folder}: give the one that the engine's option trainer names."
            )
        self.folder, self.tally = folder, Counter[str]()
        self._names: list[str] = []

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of `layout.COUNTS`."""
        self.tally[name] += by

    def next(self) -> wire.Finished | None:
        """The oldest request, whose file is gone then; None where none waits."""
        if not self._names:
            names = (path.name for path in self.folder.glob(f"{_STEM}*{_END}"))
            self._names = sorted(names, reverse=True)
        while self._names:
            path = self.folder / self._names.pop()
            try:
                packed = bytearray(path.read_bytes())
                path.unlink()
                return wire.read(memoryview(packed))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, IndexError):
                self.count("dropped_records")
        return None

    def swap_seconds(self, action: Action) -> float:
        """Nobody says."""
        return 0.0
