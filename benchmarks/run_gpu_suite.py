"""The list of `docs/gpu_checklist.md`, in parts of so many minutes, the most decisive first.

    python benchmarks/run_gpu_suite.py --out DIR --part 1 --minutes 9
    python benchmarks/run_gpu_suite.py --list

A step that fails or overruns its limit ends, with all the processes that it started, and the next
one begins; what no longer fits into the minutes is left out. DIR gets two files per part, whole at
any time: part1.log, what all steps said, and part1.json, how they ended and their results.
"""

from __future__ import annotations

import json
import os
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

ROOT = Path(__file__).resolve().parent.parent
LEAST = 15
"""Seconds that have to be left for a step to begin."""
OWN = 5  # seconds of the part's minutes that are this program's
RESULT = "RESULT"
"""Stands in a command for the file that its JSON goes to."""

QUICK = '{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
"""Graphs without vLLM's compiler: half a minute less per engine, and the same for all of them."""
VERSIONS = (
    "import torch, triton, transformers, vllm; from vllm.platforms import current_platform as p; "
    "print(torch.__version__, torch.version.cuda, triton.__version__, transformers.__version__, "
    "vllm.__version__, p.get_device_name(), torch.cuda.mem_get_info())"
)


@dataclass(frozen=True)
class Step:
    """A command of the list.

    Attributes:
        command: words after Python's own; `RESULT` among them is the file for its figures.
        estimate: seconds that it should take on an H200; limit: seconds after which it is ended.
    """

    name: str
    command: tuple[str, ...]
    estimate: int
    limit: int


def bench(name: str, options: str, estimate: int, limit: int, *words: str) -> Step:
    """`options`: a script of this folder and what follows it, without spaces inside a word."""
    script, *more = options.split()
    return Step(name, (f"benchmarks/{script}.py", *more, *words), estimate, limit)


def exact(combination: str, estimate: int, *options: str) -> Step:
    """Two engines of the example pair, float32."""
    name = " ".join(("exact:", combination, *options))
    return bench(
        name,
        "exactness --tokens=1500",
        estimate,
        2 * estimate,
        f"--combination={combination}",
        *options,
    )


def tests(name: str, estimate: int, limit: int, words: str, *more: str) -> Step:
    options = ("-m", "pytest", "-q", "--tb=short", "--timeout=120", "-p", "no:cacheprovider")
    return Step(name, (*options, *words.split(), *more), estimate, limit)


def serving(model: str, batches: str, only: str, estimate: int, limit: int) -> Step:
    """Per engine and batch a start of half a minute and seconds of work; drafters of random
    weights take half a minute more, once."""
    options = f"end_to_end --model={model} --batches={batches} --repeat=2 --out {RESULT}"
    return bench(
        f"{model}, batch {batches}", options, estimate, limit, f"--only={only}", f"--engine={QUICK}"
    )


def idle(batch: int) -> Step:
    return bench(
        f"idle share, batch {batch}",
        f"gpu_idle --batch={batch} --json {RESULT}",
        30,
        90,
        f"--engine={QUICK}",
    )


def learning_steps(model: str, batch: int, estimate: int, limit: int) -> Step:
    """Two engines at once, started one after the other."""
    return bench(
        f"adaptation's steps, {model}, batch {batch}",
        f"adaptation_steps --model={model} --batch={batch} --out {RESULT}",
        estimate,
        limit,
        f"--engine={QUICK}",
    )


PARTS: dict[int, list[Step]] = {
    1: [  # whether it works
        Step("versions", ("-c", VERSIONS), 15, 60),
        exact("SpecBlock", 50),
        exact("SpecBlock", 40, "--graphs"),
        tests("adaptive", 60, 120, "tests/engine/adaptive/test_trees.py"),
        tests("kernels", 120, 200, "-n8 tests/triton_kernels -k", "cuda or compile"),
        bench(
            "attention", f"kernels --only=attention --runs=30 --splits=256 --out {RESULT}", 70, 110
        ),
        exact("EAGLE-3", 35, "--graphs"),
        exact("SpecBlock + n-gram, merge trie, joint", 35, "--graphs"),
        tests(
            "waits, graphs",
            75,
            120,
            "tests/engine/runner/test_no_sync.py tests/engine/runner/test_graphs.py",
        ),
        idle(1),
    ],
    2: [  # how fast it is
        serving("llama-8b", "1", "SpecBlock @ 60; 8 bits; EAGLE-3 chain @ 3; adaptive", 240, 330),
        idle(8),
        bench("drafter", f"drafter_forward --rows=1,8,64 --batches=1,8,32 --out {RESULT}", 60, 100),
        bench("kernels", f"kernels --runs=30 --out {RESULT}", 75, 120),
        bench(
            "drafter, 8 bits",
            f"drafter_forward --quantization=fp8 --rows=8 --batches=1,8 --out {RESULT}",
            35,
            80,
        ),
        serving("llama-8b", "8", "SpecBlock @ 12", 90, 200),
    ],
    3: [  # more of both
        serving("llama-8b", "32", "SpecBlock @ 12; adaptive", 130, 200),
        tests("engines", 180, 240, "-n6 --dist=loadfile tests/engine"),
        serving("pair", "1", "SpecBlock @ 12", 60, 120),
        Step("offline", ("examples/offline.py", "--dtype=bfloat16", "--graphs"), 90, 150),
        serving("qwen3-8b", "1", "SpecBlock @ 60", 80, 150),
    ],
    4: [  # what can wait
        Step("prompts", ("examples/two_heads/prompts.py", "runs/two_heads"), 5, 30),
        bench(
            "two heads",
            "two_heads --dtype=bfloat16 --graphs --batch=1 --budgets=60 --chains=3 "
            f"--prompts=8 --out {RESULT}",
            300,
            400,
        ),
        serving("llama-8b", "128", "SpecBlock @ 12; adaptive", 130, 200),
    ],
    5: [  # learning while serving
        tests("recording", 90, 180, "tests/engine/test_adapt_recording.py"),
        tests(
            "adapting",
            120,
            240,
            "tests/engine/test_adapting.py tests/engine/test_adapted_folders.py",
        ),
        tests("exact under swaps", 120, 240, "tests/engine/test_adaptation_exact.py"),
        learning_steps("pair", 1, 60, 120),
        learning_steps("llama-8b", 1, 130, 220),
    ],
}


def ended(command: list[str], log: Any, limit: float) -> int | None:
    """The command's exit code; None if it overran `limit` seconds and was killed.

    What it left running is killed in any case: engines hold the GPU's memory.
    """
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
    """Run one step after the other; returns what is in the summary.

    Args:
        seconds: of all steps together.
    """
    end = time.monotonic() + seconds
    summary: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    with TemporaryDirectory() as folder, log_path.open("w", encoding="utf-8") as log:
        for number, step in enumerate(steps):
            began, left = time.monotonic(), end - time.monotonic()
            found = Path(folder) / f"{number}.json"
            words = [str(found) if word == RESULT else word for word in step.command]
            print(f"\n===== {step.name}: {' '.join(words)}", file=log, flush=True)
            state: int | str | None = "left out"
            if left >= LEAST:
                state = ended([sys.executable, *words], log, min(step.limit, left))
                state = "overran" if state is None else state
            took = round(time.monotonic() - began, 1)
            print(f"===== {step.name}: {state}, {took} s", file=log, flush=True)
            print(f"{step.name}: {state}, {took} s", flush=True)
            summary.append(
                {"step": step.name, "exit": state, "seconds": took, "estimate": step.estimate}
            )
            if found.exists():  # also of a step that was killed: ledgers are whole at any time
                results[step.name] = json.loads(found.read_text(encoding="utf-8"))
            text = json.dumps({"summary": summary, "results": results}, indent=1)
            json_path.write_text(text + "\n", encoding="utf-8")
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
    summary = run(steps, *paths, 60 * minutes - OWN)
    print("\n     exit   seconds  estimate  step")
    for each in summary:
        print(f"{each['exit']:>9}{each['seconds']:10}{each['estimate']:10}  {each['step']}")


if __name__ == "__main__":
    typer.run(main)
