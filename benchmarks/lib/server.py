"""`vllm serve` in a process group of its own: its metrics, its memory, its end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from vllm_specblock.bench.process import GRACE, GuardedProcess, end_all

START = 900
"""Seconds until a server must answer; the first one of a target compiles it."""
VLLM = str(Path(sys.executable).with_name("vllm"))


class ServerEnded(RuntimeError):
    """A server does not answer any more; the message has its last words."""


class Server(GuardedProcess):
    """A server that answers at `address`, once `wait` has returned.

    arguments: of `vllm serve`, the model first; log, env: see `GuardedProcess`; folder: where it
    runs.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, env: Mapping[str, str | None], folder: Path
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        command = [VLLM, "serve", *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        super().__init__(command, log, env, cwd=folder, stdin=subprocess.DEVNULL)

    def wait(self) -> None:
        """Wait until it answers."""
        until = time.monotonic() + START
        while time.monotonic() < until:
            self.require()
            with contextlib.suppress(OSError):
                self._get("/health")
                return
            time.sleep(0.5)
        raise ServerEnded(f"It did not answer within {START} s: {self._last_words()}")

    def require(self) -> None:
        if self.process.poll() is not None:
            raise ServerEnded(f"It ended with {self.process.returncode}: {self._last_words()}")

    def metrics(self) -> dict[str, float]:
        """Return counters and gauges by name, summed over their labels."""
        try:
            text = self._get("/metrics")
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
            self.require()
            raise ServerEnded(f"It does not answer: {error}. {self._last_words()}") from error
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def resident(self) -> float:
        """Return MiB of resident memory, of the server and all processes below it."""
        own = psutil.Process(self.process.pid)
        whole = [own, *own.children(recursive=True)]
        return sum(each.memory_info().rss for each in whole) / (1 << 20)

    def close(self) -> None:
        end_all([self])

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=30) as response:
            return response.read().decode()

    def _last_words(self) -> str:
        return f"{self.log_text()[-2000:]} (its log is {self.log})"
