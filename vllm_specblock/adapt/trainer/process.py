"""The trainer as a process of the engine: started, watched, restarted, and left if need be."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_specblock.adapt.files import lock_folder, private_folder
from vllm_specblock.adapt.link.layout import BEAT, SILENCE
from vllm_specblock.adapt.link.memory_link import EngineLink
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")

WAITS = (1.0, 10.0, 100.0)
"""Seconds before each restart; after the last one the trainer stays away."""

HEALTHY = 3600.0
"""Seconds after which what went wrong before is forgotten."""

_HOPELESS = 2
"""Exit status of a trainer that cannot follow its config."""


class TrainerProcess:
    """A trainer beside the engine.

    A thread of its own starts and watches it, since the trainer ends with the thread that started
    it. Serving never waits for either.

    Args:
        config: see `TrainerConfig`.
        link: the engine's end.
        waits: see `WAITS`.

    Attributes:
        gave_up: the trainer died once too often.
    """

    def __init__(
        self, config: TrainerConfig, link: EngineLink, waits: Sequence[float] = WAITS
    ) -> None:
        self.config, self.link, self.waits = config, link, tuple(waits)
        self.gave_up = False
        self._lock = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="specblock-trainer")

    def start(self) -> None:
        """Lock the folder for versions, and start the process; it takes some seconds to be ready.

        Who only watches reads in a folder that another engine may write to.

        Raises:
            TrainError: another engine or trainer has the folder, or it cannot be made; or there is
                none to watch.
        """
        out = None if self.config.out is None else Path(self.config.out)
        if out is not None and self.config.policy == "watch":
            if not out.is_dir():
                raise TrainError(
                    f"There is no folder {out} whose version could be watched: give the one that "
                    "another engine's option out names, or drop the option."
                )
        elif out is not None:
            private_folder(out)
            self._lock = lock_folder(out)
        atexit.register(self.stop)
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End the process: it may write what it learned within so many seconds."""
        atexit.unregister(self.stop)
        self.link.close()
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def pid(self) -> int | None:
        """Of the running process; None where none runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def _watch(self) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            status = self._run()
            if self._ends.is_set():
                return
            deaths = 1 if time.monotonic() - began > HEALTHY else deaths + 1
            if status == _HOPELESS or deaths > len(self.waits):
                self.gave_up = True
                logger.warning(
                    "SpecBlock adaptation: the trainer ended %s, so nothing more is learned; "
                    "serving goes on with the version that it has.",
                    "because it cannot start" if status == _HOPELESS else f"{deaths} times",
                )
                return
            if self._ends.wait(self.waits[deaths - 1]):
                return
            self.link.restarted()

    def _run(self) -> int:
        """Start a trainer and return its exit status."""
        threads = str(self.config.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self.config.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        shared = [each for each in (self.link.descriptor, self._lock) if each >= 0]
        numbers = map(str, (self.link.descriptor, self._lock, os.getpid()))
        # -P: the folder in which the engine was started is none to import from.
        command = [sys.executable, "-P", "-m", "vllm_specblock.adapt"]
        process = self._process = subprocess.Popen(
            [*command, self.config.to_json(), *numbers],
            env=environment,
            pass_fds=shared,
            stdin=subprocess.DEVNULL,
        )
        began = time.monotonic()
        while process.poll() is None:
            self.link.beat()
            silence = min(self.link.silence, time.monotonic() - began)
            if silence > SILENCE:
                process.kill()
            time.sleep(0.05 if self._ends.is_set() else BEAT)
        return process.returncode
