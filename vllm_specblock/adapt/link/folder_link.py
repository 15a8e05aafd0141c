"""A folder between an engine and its trainer.

    request-….safetensors   a finished request; the trainer deletes it when read
    versions/               what the trainer offers, and current.json (`adapt/versions.py`)
    counts.json             the trainer's counts
    swap_seconds.json       what the engine's last swap of heads, and of all weights, took

It lies in shared memory where the trainer is a process of the engine, else where the user says.
User text can be read from it: its mode is 0700, that of its files 0600.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
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
from vllm_specblock.adapt.link.staged import DELIVERED, StagedVersion, current_version
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")

VERSIONS = "versions"
"""Name of the folder of versions."""

SHARED_MEMORY = Path("/dev/shm")

LOOK = 0.25
"""Seconds between two looks for a version."""

WAITING = 16
"""Finished requests that may wait to be written or learned from; later ones are not recorded."""

_OURS = "specblock-adapt-"
_STEM, _END = "request-", ".safetensors"
_COUNTS, _SWAPS = "counts.json", "swap_seconds.json"


def shared_folder(token: int) -> Path:
    return SHARED_MEMORY / f"{_OURS}{token:016x}"


def new_token() -> int:
    return secrets.randbits(62)


def make_shared_folder(token: int, size: int) -> int:
    """Make an engine's folder in shared memory, and remove those whose engine is gone.

    Args:
        size: bytes that it has to hold.

    Returns:
        The descriptor of the folder's lock.

    Raises:
        TrainError: there is not enough shared memory.
    """
    for left in SHARED_MEMORY.glob(f"{_OURS}*"):
        with suppress(OSError, TrainError):  # in use, or gone meanwhile
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
    # Locked before it has its name: another engine would remove it.
    aside = folder.with_name(f".{folder.name}")
    private_folder(aside)
    lock = lock_folder(aside)
    aside.rename(folder)
    return lock


class FolderVersions:
    """The versions that a folder offers, for one rank of an engine: a thread looks for them.

    Args:
        versions: its current version is there for `staged` at once.

    Attributes:
        tally: what this end counts, by a metric's name without `adapt_`
            (`engine/metrics/exporter.py`).
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
        """Return the newest version on offer, each once; never waits."""
        found = self._found.popleft() if self._found else None
        if found is not None and found.action is Action.HEADS and found.trunk != self._trunk:
            self._seen = self._read = 0  # another trunk serves meanwhile: read all of it
            return None
        return found

    def current(self) -> StagedVersion | None:
        """Look at once; as `staged`."""
        self._look()
        return self.staged()

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        """Note that a version serves, and the seconds that the swap took from serving."""
        self._trunk = version.trunk
        self.tally["swaps"] += 1
        self.tally["swap_microseconds"] += round(1e6 * seconds)

    def refuse(self, version: StagedVersion) -> None:
        """Note that a version's weights are not finite."""
        self.tally["versions_refused_not_finite"] += 1

    @property
    def counts(self) -> Counter[str]:
        """Of both ends, as `tally`."""
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
                found = current_version(self.versions, self._trunk)
            except TrainError as error:
                if self.versions.stamp() == stamp:  # else it was replaced: the next look reads it
                    self._seen = stamp
                    self.tally["versions_refused_checksum"] += 1
                    logger.warning(
                        "SpecBlock adaptation: the current version in %s cannot be used, and what "
                        "serves stays: %s",
                        self.versions.out,
                        error,
                    )
                return
            self._seen = stamp
            if found.key != self._read:
                self._read = found.key
                self._found.append(found)


class FolderLink(FolderVersions):
    """The engine's end: `FolderVersions`, and a thread that writes finished requests.

    Args:
        room: bytes of requests that may lie in the folder; later requests are not recorded.
        slots: requests that may wait to be written.
        lock: of `make_shared_folder`; None: the folder is the user's.

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
            for left in folder.glob(f".{_STEM}*"):  # of an engine that was killed: user text
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
        """Hand a finished request, or a part of one, to the trainer; see `Finished`.

        Returns:
            Whether there was room; it never waits.
        """
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
        """Write what waits, and leave the folder to others, or remove it."""
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
            if self._held() + size <= self.room:  # else it filled up while the request waited
                aside.rename(self.folder / name)
                return
        except (OSError, SafetensorError) as error:
            logger.debug("The folder %s cannot be written to: %s", self.folder, error)
        self.tally["dropped_records"] += 1
        with suppress(OSError):
            aside.unlink()

    def _held(self) -> int:
        """Bytes of requests in the folder."""
        size = 0
        for path in self.folder.glob(f"{_STEM}*{_END}"):
            with suppress(FileNotFoundError):  # read meanwhile
                size += path.stat().st_size
        return size


class FolderSource:
    """The trainer's end of requests and counts.

    Raises:
        TrainError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise TrainError(
                f"There is no folder {folder}: give the one that the engine's option trainer names."
            )
        self.folder, self.tally = folder, Counter[str]()
        with suppress(OSError, ValueError, TypeError):  # of the trainer before
            self.tally.update(read_json(folder / _COUNTS))

    def count(self, name: str, by: int = 1) -> None:
        """Add to a count, see `FolderVersions.tally`."""
        self.tally[name] += by

    def tell(self) -> None:
        """Let the engine read the counts."""
        with suppress(OSError):
            write_json(self.folder / _COUNTS, self.tally)

    def next(self) -> Finished | None:
        """Return the oldest request, whose file is gone then; None: no request waits."""
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
        """Return what the engine's last swap of an action took from serving; 0: unknown."""
        try:
            return float(read_json(self.folder / _SWAPS)[str(action)])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0
