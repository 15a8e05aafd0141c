"""A vLLM engine in a process of its own that says its answer as it comes, and rests between turns.

Engines that are alive side by side and take turns meet the same machine: a clock that drifts, or a
neighbour, slows both. Between its turns a process is stopped, so that it takes nothing from the
other's.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class EngineFailed(RuntimeError):
    """The process ended early; the message is its last words."""


@dataclass(frozen=True)
class Answer:
    """What one prompt was answered, and what that took.

    Attributes:
        prompt, ids: token ids of the question and of the answer.
        wall, cpu: seconds by the clock, and of processor time.
        drafts, accepted: trees verified, and their tokens that were accepted.
    """

    prompt: list[int]
    ids: list[int]
    wall: float
    cpu: float
    drafts: int
    accepted: int


class Engine:
    """The other end of the process.

    Args:
        arguments: of vLLM's `LLM`.
        environment: variables of the process beside this one's; None takes one away.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str | None]):
        known = {**os.environ, **environment}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, it goes with the process
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={name: value for name, value in known.items() if value is not None},
            start_new_session=True,
        )
        self._send(arguments)

    def wait(self) -> None:
        """Until it can answer; then it rests.

        Raises:
            EngineFailed: it could not start.
        """
        self._receive()
        self._signal(signal.SIGSTOP)

    def ask(self, message: str, max_tokens: int, said: Callable[[str], object]) -> Answer:
        """The greedy answer to a user's message; `said` gets the text bit by bit.

        Raises:
            EngineFailed: it ended instead.
        """
        self._signal(signal.SIGCONT)
        self._send({"message": message, "max_tokens": max_tokens})
        while "text" in (line := self._receive()):
            said(line["text"])
        self._signal(signal.SIGSTOP)
        return Answer(**line)

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)  # which a stopped process obeys as well
        self._process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _send(self, job: Mapping[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # `_receive` says why
            pass

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            words = [text.strip() for text in self._log if text.strip()] or ["it said nothing"]
            raise EngineFailed(f"The engine ended with code {code}: {words[-1]}")
        return json.loads(line)


def serve(jobs: TextIO, out: TextIO) -> None:
    """Make the engine, answer job after job."""
    from vllm import LLM

    def say(what: Mapping[str, Any]) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    llm = LLM(**json.loads(jobs.readline()))
    # First calls allocate, and compile what was not compiled before.
    answer(llm, "Say hello in ten languages.", 24, lambda text: None)
    say({"ready": True})
    for job in map(json.loads, jobs):
        say(answer(llm, job["message"], job["max_tokens"], lambda text: say({"text": text})))


def answer(
    llm: Any, message: str, max_tokens: int, said: Callable[[str], object]
) -> dict[str, Any]:
    """One message answered, as the fields of `Answer`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
    )
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    before, used, began = counters(llm), cpu_seconds(), time.perf_counter()
    llm.llm_engine.add_request("answer", {"prompt_token_ids": prompt}, params)
    ids: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            ids += output.outputs[0].token_ids
            said(output.outputs[0].text)
    wall, cpu = time.perf_counter() - began, cpu_seconds() - used
    drafts, accepted = (now - then for now, then in zip(counters(llm), before))
    return {
        "prompt": prompt,
        "ids": ids,
        "wall": wall,
        "cpu": cpu,
        "drafts": drafts,
        "accepted": accepted,
    }


def counters(llm: Any) -> tuple[int, int]:
    """Trees verified, and tokens of them accepted, since the engine is there."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return found.get(DRAFTS, 0), found.get(ACCEPTED, 0)


def cpu_seconds() -> float:
    """Processor time of this process, all of its threads together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    # A stopped process does not see that its parent has gone: the kernel is to end it then.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # In one process, a second thread of torch only spins beside vLLM's own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # As vLLM's own attention would on a GPU, kernels in Triton would round float32 to TF32.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    # Whatever else prints, prints to the log.
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)
        serve(sys.stdin, pipe)
