"""The list of `docs/gpu_checklist.md`, in parts of so many minutes, the most decisive first.

    python benchmarks/run_gpu_suite.py --out DIR --part 1 --minutes 9
    python benchmarks/run_gpu_suite.py --list

A step that fails or overruns its limit is killed with its children, and the next one begins; steps
that no longer fit into the minutes are left out. DIR gets two files per part, whole at any time:
part1.log with all output, and part1.json with exit states and results.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from lib.results_store import ROOT, write_results

LEAST = 15
"""Seconds that have to be left for a step to begin."""
OWN = 5  # seconds of the part's minutes that are this program's
RESULT = "RESULT"
"""Stands in a command for the file that its JSON goes to."""

QUICK = '{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
"""Graphs without vLLM's compiler: half a minute less per engine, and the same for all of them."""


@dataclass(frozen=True)
class Step:
    """A command of the list: what follows Python's own name, as in a shell; seconds that it should
    take on an H200, and those after which it is ended."""

    name: str
    words: str
    estimate: int
    limit: int


TESTS = "-m pytest -q --tb=short --timeout=120 -p no:cacheprovider "
IDLE = f"benchmarks/gpu_idle.py --json {RESULT} --engine='{QUICK}' "
KERNELS = f"benchmarks/kernel_times.py --out {RESULT} "
ENGINE, RUNNER = "tests/engine", "tests/engine/runner"
BENCH = "-P -m vllm_specblock bench examples/two_heads/bench.yaml --dtype bfloat16 --nodes 60"
EXACT = "benchmarks/exactness.py --tokens=1500 --combination="
SERVED = f"benchmarks/end_to_end.py --repeat=2 --out {RESULT} --engine='{QUICK}' "
LEARNING = f"benchmarks/adaptation_steps.py --batch=1 --out {RESULT} --engine='{QUICK}' --model="
LARGE = f"{SERVED}--model=llama-8b --batches="
MERGED = "'SpecBlock + n-gram, merge trie, joint'"
SIXTY = "SpecBlock @ 60"
FEW = "SpecBlock @ 12"
PARTS: dict[int, list[Step]] = {
    1: [  # whether it works
        Step("doctor", "-P -m vllm_specblock doctor", 20, 60),
        Step("exact: SpecBlock", f"{EXACT}SpecBlock", 50, 100),
        Step("exact: SpecBlock --graphs", f"{EXACT}SpecBlock --graphs", 40, 80),
        Step("adaptive", f"{TESTS} {ENGINE}/adaptive/test_trees.py", 60, 120),
        Step("kernels", f"{TESTS} -n8 tests/triton_kernels -k 'cuda or compile'", 120, 200),
        Step("attention", f"{KERNELS} --only=attention --splits=256", 70, 110),
        Step("exact: EAGLE-3 --graphs", f"{EXACT}EAGLE-3 --graphs", 35, 70),
        Step("exact: merged --graphs", f"{EXACT}{MERGED} --graphs", 35, 70),
        Step("waits, graphs", f"{TESTS} {RUNNER}/test_no_sync.py {RUNNER}/test_graphs.py", 75, 120),
        Step("idle share, batch 1", f"{IDLE} --batch=1", 30, 90),
    ],
    2: [  # how fast it is
        Step(
            "llama-8b, batch 1",
            f"{LARGE}1 --only='{SIXTY}; 8 bits; EAGLE-3 chain @ 3; adaptive'",
            240,
            330,
        ),
        Step("idle share, batch 8", f"{IDLE} --batch=8", 30, 90),
        Step("kernels", KERNELS, 75, 120),
        Step("llama-8b, batch 8", f"{LARGE}8 --only='{FEW}'", 90, 200),
    ],
    3: [  # more of both
        Step("llama-8b, batch 32", f"{LARGE}32 --only='{FEW}; adaptive'", 130, 200),
        Step("engines", f"{TESTS} -n6 --dist=loadfile {ENGINE}", 180, 240),
        Step("pair", f"{SERVED}--model=pair --batches=1 --only='{FEW}'", 60, 120),
        Step("offline", "examples/offline.py --dtype=bfloat16 --graphs", 90, 150),
        Step("qwen3-8b", f"{SERVED}--model=qwen3-8b --batches=1 --only='{SIXTY}'", 80, 150),
    ],
    4: [  # the rest
        Step("prompts", "examples/two_heads/prompts.py runs/two_heads", 5, 30),
        Step("two heads", BENCH, 300, 400),
        Step("llama-8b, batch 128", f"{LARGE}128 --only='{FEW}; adaptive'", 130, 200),
    ],
    5: [  # learning while serving
        Step("adapting", f"{TESTS} {ENGINE}/test_adapting.py", 120, 240),
        Step("exact: adaptation", f"{TESTS} {ENGINE}/test_adaptation_exact.py", 210, 420),
        Step("adaptation's steps, pair", f"{LEARNING}pair", 60, 120),
        Step("adaptation's steps, llama-8b", f"{LEARNING}llama-8b", 130, 220),
    ],
}


def ended(command: list[str], log: Any, limit: float) -> int | None:
    """Return the exit code; None: killed after `limit` seconds. Its children are killed in any
    case: engines hold the GPU's memory."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(steps: list[Step], log_path: Path, json_path: Path, seconds: float) -> list[dict[str, Any]]:
    """Run one step after the other, within `seconds`; returns the summary."""
    end = time.monotonic() + seconds
    summary: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory() as folder, log_path.open("w", encoding="utf-8") as log:
        for number, step in enumerate(steps):
            began, left = time.monotonic(), end - time.monotonic()
            found = Path(folder) / f"{number}.json"
            words = [str(found) if each == RESULT else each for each in shlex.split(step.words)]
            print(f"\n===== {step.name}: {shlex.join(words)}", file=log, flush=True)
            state: int | str | None = "left out"
            if left >= LEAST:
                state = ended([sys.executable, *words], log, min(step.limit, left))
                state = "overran" if state is None else state
            took = round(time.monotonic() - began, 1)
            print(f"===== {step.name}: {state}, {took} s", file=log, flush=True)
            print(f"{step.name}: {state}, {took} s of {step.estimate}", flush=True)
            summary.append(
                {"step": step.name, "exit": state, "seconds": took, "estimate": step.estimate}
            )
            if found.exists():  # also of a step that was killed: ledgers are whole at any time
                results[step.name] = json.loads(found.read_text(encoding="utf-8"))
            write_results(json_path, {"summary": summary, "results": results})
    return summary


def main(
    out: Annotated[Path | None, typer.Option(help="Folder of the log and the figures.")] = None,
    part: Annotated[int, typer.Option(help=f"One of {', '.join(map(str, PARTS))}.")] = 1,
    minutes: Annotated[float, typer.Option(help="Of the whole part.")] = 9.0,
    only: Annotated[str | None, typer.Option(help="Parts of steps' names; a; b.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Only say what would run.")] = False,
) -> None:
    """Run one part and print how its steps ended."""
    if list_all or out is None:
        for number, steps in PARTS.items():
            for step in steps:
                print(f"part {number}: {step.estimate:4} s of {step.limit:4} s  {step.name}")
        return
    wanted = [word.strip() for word in only.split(";")] if only else [""]
    steps = [step for step in PARTS[part] if any(word in step.name for word in wanted)]
    out.mkdir(parents=True, exist_ok=True)
    paths = out / f"part{part}.log", out / f"part{part}.json"
    run(steps, *paths, 60 * minutes - OWN)


if __name__ == "__main__":
    typer.run(main)
