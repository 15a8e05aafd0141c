"""Shared folder of an engine and its trainer.

    request-….safetensors   a finished request; the trainer deletes it when read
    versions/               versions that the trainer offers, and current.json (`adapt/versions.py`)
    counts.json             the trainer's counts
    swap_seconds.json       duration of the engine's last swap of heads, and of all weights

It is in shared memory if the engine starts the trainer, else where the user chooses. It contains
user text: its mode is 0700, that of its files 0600.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.files import lock_folder, private_folder, read_json, write_json
from vllm_specblock.adapt.link.finished import Finished
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.adapt.versions import DELIVERED, StagedVersion, VersionFolder
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")

VERSIONS = "versions"
"""Name of the folder of versions."""

SHARED_MEMORY = Path("/dev/shm")

LOOK = 0.25
"""Seconds between two checks for a version."""

WAITING = 16
"""Maximum finished requests waiting to be written or trained on; later ones are dropped."""

_OURS = "specblock-adapt-"
_STEM, _END = "request-", ".safetensors"
_COUNTS, _SWAPS = "counts.json", "swap_seconds.json"


def shared_folder(token: int) -> Path:
    """Return the folder in shared memory that an engine calls by a random number."""
    return SHARED_MEMORY / f"{_OURS}{token:016x}"


def make_shared_folder(token: int, size: int) -> int:
    """Create an engine's `shared_folder` for `size` bytes, and remove those of dead engines.

    Returns the descriptor of the folder's lock; raises TrainError without enough shared memory.
    """
    for left in SHARED_MEMORY.glob(f"{_OURS}*"):
        with suppress(OSError, TrainError):  # in use, or removed meanwhile
            if left.lstat().st_uid == os.getuid() and not left.is_symlink():
                os.close(lock_folder(left, seconds=0.0))
                shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free < size:
        raise TrainError(
            f"{SHARED_MEMORY} has {free >> 20} MiB left, but the trainer needs {size >> 20} MiB: "
            "enlarge it (docker run --shm-size), or name a folder in 'adapt.trainer'."
        )
    folder = shared_folder(token)
    # Lock it before it gets its name, or another engine would remove it.
    aside = folder.with_name(f".{folder.name}")
    private_folder(aside)
    lock = lock_folder(aside)
    aside.rename(folder)
    return lock


class FolderVersions:
    """Versions in a folder, for one rank of an engine; a thread polls for them.

    Args:
        versions: its current version is staged immediately.

    Attributes:
        tally: counters of this end, by metric name without `adapt_`.
    """

    def __init__(self, versions: VersionFolder) -> None:
        self.versions, self.tally = versions, Counter[str]()
        self._found: deque[StagedVersion] = deque(maxlen=1)
        self._seen, self._read, self._trunk = 0, 0, DELIVERED
        self._ends, self._looking = threading.Event(), threading.Lock()
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True, name="specblock-adapt")
        self._thread.start()

    def staged(self) -> StagedVersion | None:
        """Return the newest offered version, each once, without waiting."""
        found = self._found.popleft() if self._found else None
        if found is not None and found.action is Action.HEADS and found.trunk != self._trunk:
            self._seen = self._read = 0  # another trunk serves meanwhile: read all weights
            return None
        return found

    def current(self) -> StagedVersion | None:
        """Check now, then return `staged`."""
        self._look()
        return self.staged()

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        """Record that a version serves, and the serving time lost by the swap."""
        self._trunk = version.trunk
        self.tally["swaps"] += 1
        self.tally["swap_microseconds"] += round(1e6 * seconds)

    def refuse(self, version: StagedVersion) -> None:
        """Record that a version's weights cannot serve."""
        self.tally["versions_refused_not_finite"] += 1

    @property
    def counts(self) -> Counter[str]:
        """Return the counters of both ends, as `tally`."""
        return self.tally

    def close(self) -> None:
        self._ends.set()

    def _run(self) -> None:
        while not self._ends.wait(LOOK):
            self._look()

    def _look(self) -> None:
        with self._looking:
            stamp = self.versions.stamp()
            if stamp == self._seen:
                return
            try:
                found = self.versions.staged(self._trunk)
            except TrainError as error:
                if self.versions.stamp() == stamp:  # else it was replaced: the next check reads it
                    self._seen = stamp
                    self.tally["versions_refused_checksum"] += 1
                    logger.warning(
                        "SpecBlock adaptation: the current version in %s is skipped, since it "
                        "cannot be used: %s",
                        self.versions.out,
                        error,
                    )
                return
            self._seen = stamp
            if found.key != self._read:
                self._read = found.key
                self._found.append(found)


class FolderLink(FolderVersions):
    """Engine side: `FolderVersions`, and a thread that writes finished requests.

    Args:
        room: maximum bytes of requests in the folder; later requests are dropped.
        slots: maximum requests waiting to be written.
        lock: from `make_shared_folder`; None: the folder is the user's.

    Raises:
        TrainError: the folder cannot be used, or another engine writes to it.
    """

    def __init__(
        self,
        folder: Path,
        versions: VersionFolder,
        room: int = 512 << 20,
        slots: int = WAITING,
        lock: int | None = None,
    ) -> None:
        self.folder, self.room, self.private = folder, room, lock is not None
        if lock is None:
            private_folder(folder)
            lock = lock_folder(folder)
            for left in folder.glob(f".{_STEM}*"):  # user text of a killed engine
                left.unlink(missing_ok=True)
            logger.warning(
                "SpecBlock adaptation: rows of user requests are written to %s, from which their "
                "text can be read; specblock adapt run deletes them.",
                folder,
            )
        self._lock = lock
        (folder / _COUNTS).unlink(missing_ok=True)
        self._waiting: queue.Queue[Finished | None] = queue.Queue(slots)
        self._full, self._largest, self._written = False, 0, 0
        self._swaps: dict[str, float] = {}
        self._learned: Counter[str] = Counter()
        super().__init__(versions)

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool:
        """Queue a finished request, or a part of one; return whether there was room."""
        if self._full or (record is None and finished is None):
            return False
        try:
            self._waiting.put_nowait(Finished(record, finished))
        except queue.Full:
            return False
        return True

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        super().took(version, seconds)
        self._swaps[str(version.action)] = seconds
        with suppress(OSError):
            write_json(self.folder / _SWAPS, self._swaps)

    @property
    def counts(self) -> Counter[str]:
        counts = self._learned.copy()
        counts.update(self.tally)  # `+` would drop a gain below 0
        return counts

    def close(self) -> None:
        """Write waiting requests, then unlock the folder, or remove it."""
        if self._lock < 0:
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=10)
        self._thread.join(timeout=10)
        if self.private:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _run(self) -> None:
        while True:
            with suppress(queue.Empty):
                message = self._waiting.get(timeout=LOOK)
                if message is None:
                    return
                self._write(message)
            self._full = self._held() + self._largest > self.room
            with suppress(OSError, ValueError, TypeError):
                self._learned = Counter(read_json(self.folder / _COUNTS))
            self._look()

    def _write(self, message: Finished) -> None:
        self._written += 1
        name = f"{_STEM}{time.time_ns():020d}-{os.getpid()}-{self._written}{_END}"
        aside = self.folder / f".{name}"
        try:
            message.save(aside)
            aside.chmod(0o600)
            size = aside.stat().st_size
            self._largest = max(self._largest, size)
            if self._held() + size <= self.room:  # else the folder filled up meanwhile
                aside.rename(self.folder / name)
                return
        except (OSError, SafetensorError) as error:
            logger.debug("The folder %s cannot be written to: %s", self.folder, error)
        self.tally["dropped_records"] += 1
        with suppress(OSError):
            aside.unlink()

    def _held(self) -> int:
        """Return the bytes of requests in the folder."""
        size = 0
        for path in self.folder.glob(f"{_STEM}*{_END}"):
            with suppress(FileNotFoundError):  # removed meanwhile
                size += path.stat().st_size
        return size


class FolderSource:
    """Trainer side of requests and counts; raises TrainError if there is no such folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise TrainError(
                f"There is no folder {folder}: give the one that the engine's option trainer names."
            )
        self.folder, self.tally = folder, Counter[str]()
        with suppress(OSError, ValueError, TypeError):  # of an earlier trainer
            self.tally.update(read_json(folder / _COUNTS))

    def count(self, name: str, by: int = 1) -> None:
        """Add to a count, see `FolderVersions.tally`."""
        self.tally[name] += by

    def tell(self) -> None:
        """Write the counts for the engine."""
        with suppress(OSError):
            write_json(self.folder / _COUNTS, self.tally)

    def next(self) -> Finished | None:
        """Return the oldest request and delete its file; None: there is none."""
        for path in sorted(self.folder.glob(f"{_STEM}*{_END}")):
            try:
                return Finished.load(path)
            except FileNotFoundError:
                continue
            except (SafetensorError, OSError, ValueError, KeyError, TypeError):
                self.count("dropped_records")
            finally:
                path.unlink(missing_ok=True)
        return None

    def swap_seconds(self, action: Action) -> float:
        """Return the serving time lost by the engine's last swap of an action; 0: unknown."""
        try:
            return float(read_json(self.folder / _SWAPS)[str(action)])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0
