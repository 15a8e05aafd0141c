"""Files that are whole whenever they are there, and folders with one writer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm_specblock.train.config import TrainError

LOCK = ".lock"

_DYING = 1.0
"""Seconds to wait for a writer that was killed: it keeps its files until its last thread ended."""


def private_folder(folder: Path) -> None:
    """Make a folder of mode 0700 where it is missing.

    Raises:
        TrainError: it cannot be made, or is another user's.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise TrainError(
            f"The folder {folder} cannot be used ({error.strerror}): give one of your own."
        ) from None


def lock_folder(folder: Path, seconds: float = _DYING) -> int:
    """Lock a folder for one writer; the lock goes with the last process that has the descriptor.

    Args:
        seconds: to wait for another writer.

    Raises:
        TrainError: another process has the lock, and keeps it that long.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > until:
                break
        time.sleep(0.02)
    os.close(descriptor)
    raise TrainError(
        f"Another engine or trainer uses the folder {folder}: give each a folder of its own."
    )


def digest(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by JSON in one step; its mode is 0600."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    aside.chmod(0o600)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def read_json(path: Path) -> Any:
    """Raises OSError or ValueError where there is none."""
    return json.loads(path.read_text(encoding="utf-8"))
