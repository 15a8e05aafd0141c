"""The engine of one method in its own process, stopped while another one answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_specblock.bench.config import BenchError

# -P: in a clone of the repository, vLLM would take triton_kernels/ for a package of that name.
COMMAND = (sys.executable, "-P", "-m", "vllm_specblock.engine.offline.answering")
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
BLOCK = 128
"""Maximum tokens of a cache block: platforms differ."""
GRACE = 10.0
"""Seconds that an engine has to exit."""

_GUARD = 'read let_go || kill -s KILL -- "-$1"'
"""A shell that kills a process group if this process ends without releasing it: a stopped process
would not notice. In this form each shell's `kill` takes a group."""


class GuardedProcess:
    """A process group of its own that does not outlive this process.

    Args:
        log: file for its stderr, and for its stdout unless `pipes` names another place.
        env: added to this process's environment; None removes a variable.
    """

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str | None], **pipes: Any
    ) -> None:
        self.log = log
        with log.open("w") as output:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                command,
                stderr=output,
                env={k: v for k, v in {**os.environ, **env}.items() if v is not None},
                start_new_session=True,  # its own group, which Ctrl-C does not reach
                **{"stdout": output, **pipes},
            )
        self.guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", str(self.process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace").strip()


def job_of(
    prompts: Sequence[list[int]],
    max_tokens: int,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """Return a job of `engine/offline/answering.py`; seeds: one per prompt, or 0 for all."""
    return {
        "prompts": [*prompts],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seeds": [0] * len(prompts) if seeds is None else [*seeds],
        "ignore_eos": ignore_eos,
    }


class EngineFailed(BenchError):
    """An engine did not start, or exited too early; the message says why."""


class EngineProcess(GuardedProcess):
    """An engine that is stopped between its answers, by `engine/offline/answering.py`'s protocol.

    Call `wait` before the first job. Methods that wait for it raise EngineFailed if it did not
    start, exited, or could not answer.

    Args:
        arguments: of vLLM's `LLM`.
        env: added to `ENV`.

    Attributes:
        facts: what the engine reports when it is ready.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        env: Mapping[str, str | None],
        log: Path,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.name = name
        pipe = subprocess.PIPE
        super().__init__(command, log, {**ENV, **env}, stdin=pipe, stdout=pipe, text=True)
        self.send(arguments)

    def wait(self) -> None:
        """Wait until it can answer, then stop it."""
        self.facts = self.receive()
        self.pause()

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return its answer to a job without `stream`; it runs only meanwhile."""
        self.resume()
        self.send(job)
        answer = self.receive()
        self.pause()
        return answer

    def stream(self, job: Mapping[str, Any]) -> Iterator[list[int]]:
        """Yield the new tokens of each step of a job of one prompt; it answers while it runs."""
        self.send({**job, "stream": True})
        while "said" in (answer := self.receive()):
            yield answer["said"][1]

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def send(self, what: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` says why
            pipe = self.process.stdin
            assert pipe is not None
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line.endswith("\n") else {"error": self._end()}
        if "error" in answer:
            raise EngineFailed(
                f"The engine of {self.name} failed: {answer['error'].rstrip('.')} (its log is "
                f"{self.log})."
            )
        return answer

    def _end(self) -> str:
        """Return how it exited, with its last line of output."""
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        words = self.log_text().splitlines()
        return f"it ended with code {code}" + (f", after: {words[-1].strip()}" if words else "")


def end_all(processes: Iterable[GuardedProcess]) -> None:
    """End the processes and their children, except those that have been ended before."""
    alive = [each for each in processes if each.guard.stdin and not each.guard.stdin.closed]
    for each in alive:
        with contextlib.suppress(BrokenPipeError):  # ends the wait of a main thread for a job
            if each.process.stdin:
                each.process.stdin.close()
        each.signal(signal.SIGTERM)  # another thread may get it
        each.signal(signal.SIGCONT)
    until = time.monotonic() + GRACE
    for each in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(BrokenPipeError), each.process:  # closes its pipes and waits
            each.signal(signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            each.guard.communicate(b"let go\n")


def cache_bytes(config: Any, length: int, batch: int, dtype_bytes: int, spare: int = 64) -> int:
    """Return the KV cache of requests of `length` tokens, with a quarter for drafters and drafts.

    `config` is the target's, of transformers; `spare` are further blocks.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    blocks = batch * (-(-length // BLOCK) + 2) + spare
    # A SpecBlock drafter keeps K = 4 entries per token in each of its two layers.
    layers = config.num_hidden_layers + 8
    entry = size * config.num_key_value_heads * 2 * dtype_bytes
    return int(1.25 * blocks * BLOCK * layers * entry)


def shared_arguments(target: Path, dtype: str, length: int, batch: int) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM` for engines that take turns.

    `max_model_len` is `length`, or what the target allows.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target).get_text_config()
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    size = 4 if dtype in ("float32", "float", "auto") else 2
    return {
        "model": str(target),
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,  # a second round would skip its prompts
        "disable_log_stats": False,  # the counters that τ is read from
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": cache_bytes(config, length, batch, size, spare=8),
        # vLLM wants this share of a GPU free; many engines use one.
        "gpu_memory_utilization": 0.05,
    }
