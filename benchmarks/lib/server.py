"""`vllm serve` in a process group of its own: its metrics, its memory, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from vllm_specblock.bench.process import GRACE, start_guard

START = 600
"""Seconds that a server is given to start."""


class ServerEnded(RuntimeError):
    """A server is not there any more; the message has its last words."""


class Server:
    """A server that answers at `address`, once `wait` has returned.

    Args:
        arguments: of `vllm serve`, the model first.
        folder: where it runs.
        log: takes all that it prints.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address, self.log = f"http://127.0.0.1:{port}", log
        environment = os.environ | {
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            # Two servers take turns: either may have every core, and none is to spin.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        # Both are for engines within one process, as tests have them.
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET"):
            environment.pop(name, None)
        command = [str(Path(sys.executable).with_name("vllm")), "serve", *arguments]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.guard = start_guard(self.process)

    def wait(self) -> None:
        """Until it answers.

        Raises:
            ServerEnded: it did not start.
        """
        until = time.monotonic() + START
        while time.monotonic() < until:
            self.require()
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self._get("/health")
                return
            time.sleep(0.5)
        raise ServerEnded(f"It did not answer within {START} s: {self._last_words()}")

    def require(self) -> None:
        """Raises:
        ServerEnded: it is not there any more.
        """
        if self.process.poll() is not None:
            raise ServerEnded(f"It ended with {self.process.returncode}: {self._last_words()}")

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, summed over their labels.

        Raises:
            ServerEnded: it does not answer any more.
        """
        try:
            text = self._get("/metrics")
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
            self.require()
            raise ServerEnded(f"It does not answer: {error}. {self._last_words()}") from error
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def resident(self) -> dict[str, float]:
        """MiB of resident memory: the server's own process, and all that it started."""
        own = psutil.Process(self.process.pid)
        below = own.children(recursive=True)
        return {
            "server": own.memory_info().rss / (1 << 20),
            "engine": sum(each.memory_info().rss for each in below) / (1 << 20),
        }

    def close(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.guard.communicate(b"let go\n")

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=30) as response:
            return response.read().decode()

    def _last_words(self) -> str:
        return f"{self.log.read_text(errors='replace')[-2000:].strip()} (its log is {self.log})"
