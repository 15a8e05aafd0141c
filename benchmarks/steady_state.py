"""One vLLM engine in a process of its own, timed step by step while all its requests decode.

Takes what `engine_process.py` takes and answers in its form, for `engine_process.run`. Prompts are
vLLM's, texts or ids. `seconds` and the counters named `steady:…` are of one window: from the step
at which every request has had `WARM` outputs to the one at which the first request ends. Filling
the cache, and a batch that thins out, are not in it. The counters of speculation are over all
windows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from engine_process import MARK, Answer, Task

from vllm_specblock.engine.offline.answering import grown, read_counters

WARM = 3
"""Outputs of every request before a window begins."""
TOKENS, STEPS = "steady:tokens", "steady:steps"
DRAFTING, DEVICE = "steady:drafting_ns", "steady:device_bytes"


def params_of(task: Task, count: int) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return [
        SamplingParams(
            temperature=task.temperature,
            max_tokens=count,
            seed=index,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for index in range(task.batch)
    ]


def window(llm: Any, task: Task, name: str, stopwatch: Any) -> tuple[float, Counter]:
    """One pass; returns the window's seconds and its counters.

    Args:
        stopwatch: `engine.stopwatch.Stopwatch`, or None where nothing is drafted.

    Raises:
        RuntimeError: some request ended before all were warm.
    """
    for index, (prompt, params) in enumerate(zip(task.prompts, params_of(task, task.max_tokens))):
        llm.llm_engine.add_request(f"{name}-{index}", prompt, params)
    outputs, found, took = Counter(), Counter(), 0.0
    began: float | None = None
    before: dict[str, int] = {}
    while llm.llm_engine.has_unfinished_requests():
        answers = [each for each in llm.llm_engine.step() if each.outputs[0].token_ids]
        now = time.perf_counter()
        open_ = began is not None and not found["ended"]
        if open_ and answers:
            found[STEPS] += 1
            found[TOKENS] += sum(len(each.outputs[0].token_ids) for each in answers)
            took = now - began
        outputs.update(each.request_id for each in answers)
        if any(each.finished for each in answers) and not found["ended"]:
            if not open_:
                raise RuntimeError(f"A request ended before all had {WARM} outputs: ask for more.")
            found["ended"] = 1
            if stopwatch is not None:
                found[DRAFTING], _ = stopwatch.take()
            found.update(grown(before, read_counters(llm.get_metrics())))
        if began is None and len(outputs) == task.batch and min(outputs.values()) >= WARM:
            if stopwatch is not None:
                stopwatch.take()
            before = read_counters(llm.get_metrics())
            began = time.perf_counter()
    del found["ended"]
    return took, found


def answer(llm: Any, task: Task, stopwatch: Any) -> Answer:
    """The quickest of `task.repeat` passes, per token; a pass of one token fills the cache."""
    from vllm import SamplingParams

    llm.generate(task.prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    window(llm, task, "warm", stopwatch)
    passes = [window(llm, task, f"pass {index}", stopwatch) for index in range(task.repeat)]
    seconds, best = min(passes, key=lambda each: each[0] / each[1][TOKENS])
    counted = sum((found for _, found in passes), Counter())
    ours = {name: best[name] for name in (TOKENS, STEPS, DRAFTING)}
    return Answer([], seconds, dict(counted) | ours)


def device_bytes() -> int:
    """GPU memory that is in use, by whomever; 0 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def serve(request: dict[str, Any]) -> None:
    """Make the engine, answer every task."""
    import torch
    from vllm import LLM

    from vllm_specblock.engine.metrics.stopwatch import Stopwatch

    settings: dict[str, Any] = {
        "model": request["model"],
        "speculative_config": request["speculative"],
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
    }
    llm = LLM(**settings | request["engine"])
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    stopwatch = None
    if request["speculative"] is not None:
        stopwatch = Stopwatch(runner.speculator, torch.cuda.is_available())
    for task in request["tasks"]:
        found = answer(llm, Task(**task), stopwatch)
        found.counters[DEVICE] = device_bytes()
        # A progress bar may stand where the line begins.
        print("\n" + MARK + json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    # vLLM's CPU build uses Model Runner V2 only when told to; on a GPU it is the default.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what `Stopwatch` times is in here
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # In one process, a second thread of torch only spins beside vLLM's own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(json.loads(sys.stdin.read()))
