"""Trainer process of an engine: start, monitoring and restarts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace

from vllm_specblock.adapt.link.folder_link import FolderLink
from vllm_specblock.adapt.trainer.trainer import CANNOT_START, TrainerConfig

logger = logging.getLogger("vllm.specblock")

MODULE = "vllm_specblock.adapt.trainer.trainer"

WAITS = (1.0, 10.0, 100.0)
"""Seconds before each restart; there is none after the last."""


class TrainerProcess:
    """A trainer process, monitored by a thread; serving never waits for either.

    config: its link is set here. link: the engine's side, in shared memory. gave_up: the trainer
    is not started again.
    """

    def __init__(
        self, config: TrainerConfig, link: FolderLink, waits: Sequence[float] = WAITS
    ) -> None:
        self.config = replace(config, link=str(link.folder))
        self.link, self.waits = link, waits
        self.gave_up = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="specblock-trainer")

    def start(self) -> None:
        """Lock the folder for versions, and start the process.

        Raises:
            TrainError: another engine or trainer uses the folder, or it cannot be created.
        """
        self.link.versions.lock()
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Stop the process; it has this many seconds to write its version."""
        self._ends.set()
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive():
            self._thread.join(seconds)
        self.link.close()
        self.link.versions.unlock()

    @property
    def pid(self) -> int | None:
        """Process id; None: not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def _watch(self) -> None:
        for wait in (*self.waits, None):
            status = self._run()
            if self._ends.is_set():
                return
            if status == CANNOT_START or wait is None:
                break
            if self._ends.wait(wait):
                return
            self.link.tally["trainer_restarts"] += 1
        logger.warning(
            "SpecBlock adaptation: the trainer ended with status %d and is not restarted; "
            "serving continues with the current version.",
            status,
        )
        self.gave_up = True

    def _run(self) -> int:
        """Start a trainer and return its exit status."""
        threads = str(self.config.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if self.config.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        arguments = json.dumps(asdict(self.config)), str(os.getpid())
        # -P: import nothing from the working directory.
        command = [sys.executable, "-P", "-m", MODULE, *arguments]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)  # the lowest
        if self._ends.is_set():  # stopped meanwhile
            self._process.terminate()
        return self._process.wait()
