"""A trainer and the process that it belongs to, killed at random moments.

The process stands in for an engine: it offers requests of random rows and takes what is staged, as
fast as it can, and says how long that took.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.files import write_json
from vllm_specblock.adapt.link.folder_link import (
    VERSIONS,
    FolderLink,
    make_shared_folder,
    new_token,
    shared_folder,
)
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError

ROWS, PATIENCE = 24, 120.0
Said = dict[str, Any]


def stand_in(drafter: Path, target: Path, out: Path, says: Path) -> None:
    """Offer, take, and write what happened to `says`, until the process is killed."""
    config = checkpoint.read_config(drafter)
    hidden, draw = config.target_hidden_size, torch.Generator().manual_seed(0)
    token = new_token()
    lock, folder = make_shared_folder(token, 1 << 26), shared_folder(token)
    link = FolderLink(folder, VersionFolder(folder / VERSIONS, drafter, target), 1 << 26, lock=lock)
    wanted = TrainerConfig(
        str(drafter), str(target), "always", "all", every=2, out=str(out), seconds=0
    )
    process = TrainerProcess(wanted, link, waits=(0.0,) * 1000)
    process.start()
    said: Said = {"taken": 0, "slowest_ms": 0.0, "not_finite": 0}
    number, told = 0, 0.0
    while True:
        number += 1
        record = Record(
            f"request {number}",
            torch.randn(ROWS, 3 * hidden, generator=draw),
            torch.randn(ROWS, hidden, generator=draw),
            torch.randint(config.vocab_size, (ROWS,), generator=draw),
            torch.arange(ROWS) >= 4,
        )
        began = time.perf_counter()
        link.offer(record, FinishedRequest(4.0, 10, 20, 0.5))
        found = link.staged()
        said["slowest_ms"] = max(said["slowest_ms"], 1e3 * (time.perf_counter() - began))
        if found is not None:
            finite = all(bool(torch.isfinite(each).all()) for each in found.tensors.values())
            said["not_finite"] += not finite
            link.took(found)
            said["taken"] += 1
        if time.monotonic() - told > 0.1:
            told = time.monotonic()
            counts = link.counts
            write_json(
                says,
                {
                    **said,
                    "folder": str(folder),
                    "trainer": process.pid,
                    "torn": counts["versions_refused_checksum"],
                    "restarts": counts["trainer_restarts"],
                },
            )
        time.sleep(0.01)


def kill_all(
    drafter: Path, target: Path, out: Path, trainers: int, engines: int, seed: int
) -> Said:
    """Kill so many trainers, over as many lives of an engine as that is to be killed.

    Returns:
        what happened in all of them: `moments`, `taken` versions, the `slowest_ms` call of the
        engine, versions that it took though they were `not_finite`, `torn` ones that it refused,
        `orphans` (trainers that outlived their engine), `unusable` (starts without the version that
        the folder names), `left` (half-written files after the next lock, and folders in shared
        memory).
    """
    draw = random.Random(seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    says = out.parent / "says.json"
    totals: Said = {"moments": 0, "taken": 0, "slowest_ms": 0.0, "not_finite": 0, "torn": 0}
    totals |= {"orphans": 0, "unusable": 0, "left": 0}
    for life in range(engines):
        says.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).parent / "adaptation.py"), "engine"]
        started = subprocess.Popen([*command, *map(str, (drafter, target, out, says))])
        with killed_at_last(started) as process:
            known: set[int] = set()
            for _ in range(trainers // engines + (life < trainers % engines)):
                pid = _next(says, known)
                _wait(lambda: _said(says).get("taken", 0), process)
                time.sleep(0.5 * draw.random())
                os.kill(pid, signal.SIGKILL)
                totals["moments"] += 1
            last = _next(says, known)
            before = _said(says).get("taken", 0)
            _wait(lambda before=before: _said(says).get("taken", 0) > before, process)
            # A trainer looks once in a second for what is to be written: any moment of two of them.
            time.sleep(2.0 * draw.random())
        totals["moments"] += 1
        found = _said(says)
        for name in ("taken", "not_finite", "torn"):
            totals[name] += found[name]
        totals["slowest_ms"] = round(max(totals["slowest_ms"], found["slowest_ms"]), 1)
        until = time.monotonic() + 10
        while _alive(last) and time.monotonic() < until:
            time.sleep(0.05)
        totals["orphans"] += _alive(last)
        folder = VersionFolder(out, drafter, target)
        try:
            folder.read(folder.current())
        except TrainError:
            totals["unusable"] += 1
        folder.lock()  # raises TrainError while another process has it
        folder.unlock()
        totals["left"] += sum(path.name not in (".lock",) for path in out.glob(".*"))
        totals["left"] += Path(found["folder"]).exists()
    return totals


@contextlib.contextmanager
def killed_at_last(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Also where what is asked of it fails: it would go on for good."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _said(says: Path) -> Said:
    try:
        return dict(json.loads(says.read_text()))
    except (OSError, ValueError):
        return {}


def _next(says: Path, known: set[int]) -> int:
    """The trainer that runs now, and was not killed."""
    pid = _wait(lambda: (found := _said(says).get("trainer")) not in known and found)
    known.add(pid)
    return int(pid)


def _wait(what: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := what()):
        if time.monotonic() > until or (process is not None and process.poll() is not None):
            raise RuntimeError("The process that stands in for an engine does not go on.")
        time.sleep(0.02)
    return found


def _alive(pid: int) -> bool:
    """Whether any of a process's threads runs: the first one can have ended before the others."""
    try:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(stat.rsplit(")", 1)[1].split()[0] not in "ZX" for stat in threads)
