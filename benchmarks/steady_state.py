"""One vLLM engine in a process of its own, timed step by step while all its requests decode.

`end_to_end.py` starts this file as an `EngineProcess`. A job has `prompts` as vLLM takes them,
`max_tokens` and `repeat`. Seconds and the counters named `steady:…` are of one window: from the
step at which every request has had `WARM` outputs to the one at which the first request ends. The
counters of speculation are over all windows.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_specblock.config import METHOD
from vllm_specblock.engine.offline.answering import (
    Answering,
    grown,
    main,
    read_counters,
    stopwatch_of,
)

WARM = 3
"""Outputs of every request before a window begins."""
TOKENS, STEPS = "steady:tokens", "steady:steps"
DRAFTING, DEVICE = "steady:drafting_ns", "steady:device_bytes"


def params_of(job: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return [
        SamplingParams(
            temperature=0.0,
            max_tokens=job["max_tokens"],
            seed=index,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for index in range(len(job["prompts"]))
    ]


def window(llm: Any, job: dict[str, Any], name: str, stopwatch: Any) -> tuple[float, Counter]:
    """Return the seconds and the counters of one pass over the prompts.

    Args:
        stopwatch: `engine.metrics.draft_clock.Stopwatch`, or None where nothing is drafted.

    Raises:
        RuntimeError: a request ended before all were warm.
    """
    for index, (prompt, params) in enumerate(zip(job["prompts"], params_of(job))):
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
        if began is None and len(outputs) == len(job["prompts"]) and min(outputs.values()) >= WARM:
            if stopwatch is not None:
                stopwatch.take()
            before = read_counters(llm.get_metrics())
            began = time.perf_counter()
    del found["ended"]
    return took, found


class SteadyState(Answering):
    """Answers a job with the fastest of its passes, per token."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        speculative = arguments.get("speculative_config") or {}
        if speculative.get("method") == METHOD and "synthetic_acceptance_rates" in speculative:
            # The process is started without this folder on its path.
            sys.path.insert(0, str(Path(__file__).parent))
            from lib.acceptance import imposed
            from lib.imposed_acceptance import impose

            impose(speculative["synthetic_acceptance_rates"])
            ours = {key: x for key, x in speculative.items() if key not in imposed([], 0)}
            arguments = arguments | {"speculative_config": ours}
        super().__init__(arguments)
        if speculative:
            self.stopwatch = stopwatch_of(self.llm)

    def answer(self, job: dict[str, Any], said: Any = None) -> dict[str, Any]:
        from vllm import SamplingParams

        # A pass of one token fills the cache; the first window allocates and compiles.
        once = SamplingParams(max_tokens=1, detokenize=False)
        self.llm.generate(job["prompts"], once, use_tqdm=False)
        window(self.llm, job, "warm", self.stopwatch)
        passes = [
            window(self.llm, job, f"pass {index}", self.stopwatch) for index in range(job["repeat"])
        ]
        seconds, best = min(passes, key=lambda each: each[0] / each[1][TOKENS])
        counted = sum((found for _, found in passes), Counter())
        counters = dict(counted) | {name: best[name] for name in (TOKENS, STEPS, DRAFTING)}
        return {"seconds": seconds, "counters": counters | {DEVICE: device_bytes()}}


def device_bytes() -> int:
    """GPU memory in use by all processes; 0 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    main(SteadyState)
