"""One vLLM engine in a process of its own: tasks go in, what it generated and counted comes out.

A process ends with all that its engine held, and an engine that fails takes nothing along.

    echo '{"model": ..., "engine": {...}, "tasks": [...]}' | python benchmarks/engine_process.py

prints one JSON line per task after `MARK`. `run` does that for a benchmark.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_specblock.engine.metrics.acceptance import acceptance_length_of
from vllm_specblock.engine.offline.answering import grown, read_counters

MARK = "engine_process:"
TARGET = Path(__file__).resolve().parents[1] / "examples/tiny_pair/target"


class EngineFailed(RuntimeError):
    """The engine's process ended before its tasks did; the message is its last words."""


@dataclass(frozen=True)
class Task:
    """Prompts to answer.

    Attributes:
        prompts: texts; each has its number as its seed.
        temperature: 0 is greedy.
        max_tokens: generated per prompt, none less.
        batch: prompts at a time.
        repeat: passes over the prompts; the quickest counts.
    """

    prompts: list[str]
    temperature: float
    max_tokens: int
    batch: int = 1
    repeat: int = 1


@dataclass(frozen=True)
class Request:
    """An engine to make, and its tasks.

    Attributes:
        model: folder of the target.
        speculative: vLLM's `speculative_config`; None for plain vLLM.
        engine: further arguments of `LLM`.
    """

    model: str
    speculative: dict[str, Any] | None
    tasks: list[Task]
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What one task gave.

    Attributes:
        ids: generated token ids of each prompt.
        seconds: of the quickest pass.
        counters: by how much those of `read_counters` grew, over all passes.
    """

    ids: list[list[int]]
    seconds: float
    counters: dict[str, int]

    @property
    def tau(self) -> float:
        return acceptance_length_of([self.counters])

    def summary(self, plain: dict[str, Any] | None) -> dict[str, Any]:
        """What a benchmark keeps of it, in JSON's types.

        Args:
            plain: the summary of plain vLLM's answer to the same task, which says how many
                outputs are `different`; None for plain vLLM itself.
        """
        digests = [hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] for ids in self.ids]
        count = sum(map(len, self.ids))
        found = {
            "tau": round(self.tau, 4),
            "tokens_per_second": round(count / self.seconds, 2),
            "tokens": count,
            "seconds": round(self.seconds, 3),
            "counters": self.counters,
            "digests": digests,
        }
        if plain is not None:
            both = zip(digests, plain["digests"], strict=True)
            found["different"] = sum(ours != theirs for ours, theirs in both)
        return found


def run(request: Request, script: Path = Path(__file__)) -> Iterator[Answer]:
    """The answer to each task, as it comes.

    Raises:
        EngineFailed: the process ended with an error, or without all answers.
    """
    # What else the engine says goes to stderr as it comes; its last words are the error's.
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        process.stdin.write(json.dumps(asdict(request)))
        process.stdin.close()
        last, count = "", 0
        for line in process.stdout:
            if line.startswith(MARK):
                count += 1
                yield Answer(**json.loads(line.removeprefix(MARK)))
            elif line.strip():
                last = line.strip()
                print(line, end="", file=sys.stderr)
        code = process.wait()
    if code or count < len(request.tasks):
        raise EngineFailed(f"The engine ended with code {code}: {last}")


def answer(llm: Any, task: Task) -> Answer:
    """Run one task in this process."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=task.temperature, max_tokens=task.max_tokens, seed=index, ignore_eos=True
        )
        for index in range(len(task.prompts))
    ]
    before, seconds, outputs = read_counters(llm.get_metrics()), float("inf"), []
    for _ in range(task.repeat):
        outputs, began = [], time.perf_counter()
        for first in range(0, len(params), task.batch):
            part = slice(first, first + task.batch)
            answers = llm.generate(task.prompts[part], params[part], use_tqdm=False)
            outputs += [each.outputs[0] for each in answers]
        seconds = min(seconds, time.perf_counter() - began)
    counters = grown(before, read_counters(llm.get_metrics()))
    return Answer([list(output.token_ids) for output in outputs], seconds, counters)


def serve(request: dict[str, Any]) -> None:
    """Make the engine, answer every task."""
    from vllm import LLM

    tasks = [Task(**task) for task in request["tasks"]]
    settings: dict[str, Any] = {
        "model": request["model"],
        "speculative_config": request["speculative"],
        "max_model_len": 1024,
        "max_num_seqs": max(8, *(task.batch for task in tasks)),
        "enable_prefix_caching": False,  # a second pass would be spared its prompts
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
    }
    llm = LLM(**settings | request["engine"])
    for task in tasks:
        # First calls of a shape allocate and compile.
        warm = {"prompts": task.prompts[: task.batch], "max_tokens": min(16, task.max_tokens)}
        answer(llm, Task(**asdict(task) | warm | {"repeat": 1}))
        # A progress bar may stand where the line begins.
        print("\n" + MARK + json.dumps(asdict(answer(llm, task))), flush=True)


if __name__ == "__main__":
    # vLLM's CPU build uses Model Runner V2 only when told to; on a GPU it is the default.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # In one process, a second thread of torch only spins beside vLLM's own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(json.loads(sys.stdin.read()))
