"""One vLLM engine in a process of its own, timed step by step while all its requests decode.

`end_to_end.py` starts this file as an `EngineProcess`. A job has `prompts`, `max_tokens` and
`repeat`. Seconds and the counters named `steady:…` are of one window: from the step at which every
request has had `WARM` outputs to the one at which the first request ends. The counters of
speculation are over all windows.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_specblock.config import METHOD
from vllm_specblock.engine.offline.answering import Answering, main, read_counters, stopwatch_of

WARM = 3
"""Outputs of every request before a window begins."""
TOKENS, STEPS = "steady:tokens", "steady:steps"
DRAFTING, DEVICE = "steady:drafting_ns", "steady:device_bytes"


def decode_steps(
    llm: Any,
    prompts: Sequence[Any],
    tokens: int,
    name: str,
    before: Callable[[bool], object] = bool,
) -> list[tuple[float, int]]:
    """Return seconds and new tokens of every step in which all requests decode.

    Args:
        tokens: of each greedy answer; none ends earlier.
        before: called before every step, and after the last one, with whether it counts.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            seed=index,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        llm.llm_engine.add_request(f"{name}-{index}", prompt, params)
    found: list[tuple[float, int]] = []
    outputs, ended = Counter[str](), False
    while llm.llm_engine.has_unfinished_requests():
        counts = not ended and len(outputs) == len(prompts) and min(outputs.values()) >= WARM
        before(counts)
        began = time.perf_counter()
        answers = [each for each in llm.llm_engine.step() if each.outputs[0].token_ids]
        if counts:
            new = sum(len(each.outputs[0].token_ids) for each in answers)
            found.append((time.perf_counter() - began, new))
        outputs.update(each.request_id for each in answers)
        ended = ended or any(each.finished for each in answers)
    before(False)
    if not found:
        raise RuntimeError(f"A request ended before all had {WARM} outputs: ask for more tokens.")
    return found


def window(llm: Any, job: dict[str, Any], name: str, stopwatch: Any) -> tuple[float, Counter]:
    """Return the seconds and the counters of one pass; stopwatch: None without a drafter."""
    counters: list[Counter[str]] = []
    found = Counter[str]()

    def read(counts: bool) -> None:
        if len(counters) == (0 if counts else 1):  # the window begins or ends
            counters.append(read_counters(llm.get_metrics()))
            found[DRAFTING] = 0 if stopwatch is None else stopwatch.take()[0]

    steps = decode_steps(llm, job["prompts"], job["max_tokens"], name, read)
    found.update(counters[1] - counters[0])
    found[STEPS] = sum(tokens > 0 for _, tokens in steps)
    found[TOKENS] = sum(tokens for _, tokens in steps)
    return sum(seconds for seconds, _ in steps), found


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
