"""One vLLM engine in a process of its own, timed step by step while all its requests decode.

`end_to_end.py` starts this file as an `EngineProcess`. A job has `prompts` and `max_tokens`. Its
seconds and counters are of one window: from the step at which every request has had `WARM` outputs
to the one at which the first request ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_specblock.config import METHOD
from vllm_specblock.engine.offline import answering

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


class SteadyState(answering.Answering):
    """Answers a job with one window; `cpu` is CPU time of the process and its children."""

    passes = 0

    def __init__(self, arguments: dict[str, Any]) -> None:
        speculative = arguments.get("speculative_config") or {}
        if speculative.get("method") == METHOD and "synthetic_acceptance_rates" in speculative:
            from lib.acceptance import imposed
            from lib.imposed_acceptance import impose

            impose(speculative["synthetic_acceptance_rates"])
            ours = {key: x for key, x in speculative.items() if key not in imposed([], 0)}
            arguments = arguments | {"speculative_config": ours}
        super().__init__(arguments)
        if speculative:
            self.stopwatch = answering.stopwatch_of(self.llm)

    def answer(self, job: dict[str, Any], said: Any = None) -> dict[str, Any]:
        read: list[tuple[Counter[str], float]] = []
        found = Counter[str]()

        def measure(counts: bool) -> None:
            if len(read) == (0 if counts else 1):  # the window begins or ends
                counters = answering.read_counters(self.llm.get_metrics())
                read.append((counters, answering.cpu_seconds()))
                found[DRAFTING] = 0 if self.stopwatch is None else self.stopwatch.take()[0]

        self.passes += 1
        steps = decode_steps(
            self.llm, job["prompts"], job["max_tokens"], f"pass {self.passes}", measure
        )
        (before, began), (after, ended) = read
        found.update(after - before)
        found[STEPS] = sum(tokens > 0 for _, tokens in steps)
        found[TOKENS] = sum(tokens for _, tokens in steps)
        found[DEVICE] = device_bytes()
        seconds = sum(seconds for seconds, _ in steps)
        return {"seconds": seconds, "cpu": ended - began, "counters": dict(found)}


def device_bytes() -> int:
    """GPU memory in use by all processes; 0 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    answering.main(SteadyState)
