"""Private folders with one writer, and JSON files that are replaced in one step."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.shards import replace

_DYING = 1.0
"""Seconds to wait for a killed writer: its files stay locked until its last thread exits."""


def private_folder(folder: Path) -> None:
    """Create a folder of mode 0700 if missing; raise TrainError if that fails or it is not ours."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise TrainError(
            f"The folder {folder} cannot be used ({error.strerror}): give one of your own."
        ) from None


def lock_folder(folder: Path, seconds: float = _DYING) -> int:
    """Lock a folder for one writer, until its descriptor is closed or the process ends.

    Raises:
        TrainError: another process keeps the lock for so many `seconds`.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def write_json(path: Path, content: Any) -> None:
    """Replace a file of mode 0600."""

    def write(aside: Path) -> None:
        aside.touch(0o600)
        aside.write_text(json.dumps(content), encoding="utf-8")

    replace(path, write)


def read_json(path: Path) -> Any:
    """Read a JSON file; raise OSError or ValueError if there is none."""
    return json.loads(path.read_text(encoding="utf-8"))
