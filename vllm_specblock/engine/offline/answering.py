"""Offline engine process: jobs come in, tokens and costs go out.

`python -m vllm_specblock.engine.offline.answering` reads JSON lines: the arguments of vLLM's `LLM`,
then jobs until the input ends. It writes JSON lines: facts of the engine, then an answer per job. A
job with `stream` also gets {"said": [prompt, new tokens]} in each step; an error ends with
{"error": sentence}. vLLM's own output goes to stderr. `bench/process.py` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm_specblock.engine.metrics.acceptance import REQUESTS, STEPS, TOKENS

DRAFTING = ("vllm:specblock_drafting_nanoseconds", "vllm:specblock_drafting_steps")
"""Time of the drafters, and the steps it was taken over."""


def read_counters(metrics: list[Any]) -> Counter[str]:
    """Return the metrics that τ needs and every speculation counter, by name and drafter.

    The difference of two readings is what was added between them.
    """
    found = Counter[str]()
    for metric in metrics:
        if metric.name in (REQUESTS, STEPS):
            found[metric.name] += metric.count
        elif metric.name == TOKENS or ("spec" in metric.name and hasattr(metric, "value")):
            drafter = metric.labels.get("head")
            found[metric.name + (f"{{head={drafter}}}" if drafter else "")] += int(metric.value)
    return found


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children, ended ones included."""
    import psutil

    this = psutil.Process()
    took = 0.0
    for each in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            took += sum(each.cpu_times()[:4])  # user and system time, own and of ended children
    return took


def stopwatch_of(llm: Any) -> Any:
    """Return a `DraftClock` of an engine's `propose`; None: its drafter is out of reach.

    It times steps without prompts. For vLLM's own speculators: ours also commits there.
    """
    import torch

    from vllm_specblock.engine.metrics.counters import DraftClock

    core = llm.llm_engine.engine_core
    if not llm.llm_engine.vllm_config.use_v2_model_runner or not hasattr(core, "engine_core"):
        return None
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    clock = DraftClock(torch.zeros(3, dtype=torch.int64, device=runner.device))
    propose = runner.speculator.propose

    def timed(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        clock.begin()
        result = propose(batch, *args, **kwargs)
        if not batch.has_prefill:
            clock.end()
        return result

    runner.speculator.propose = timed
    return clock


class Answering:
    """An engine, and what its answers cost; `arguments` are those of vLLM's `LLM`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        from vllm_specblock.engine.patches import load_compiled_models

        load_compiled_models()  # of plain vLLM, too
        self.llm = LLM(**arguments)
        method = (arguments.get("speculative_config") or {}).get("method", "specblock")
        self.stopwatch = None if method == "specblock" else stopwatch_of(self.llm)

    def facts(self) -> dict[str, Any]:
        """Return facts of this engine beyond its arguments."""
        config = self.llm.llm_engine.vllm_config
        return {
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "compiled": config.compilation_config.mode.name,
        }

    def answer(
        self, job: dict[str, Any], said: Callable[[int, list[int]], object] | None = None
    ) -> dict[str, Any]:
        """Answer one job: all its prompts at a time.

        Args:
            job: prompts [n][ids], seeds [n], temperature, max_tokens, ignore_eos.
            said: gets a prompt's index and its new tokens as they come, if given.

        Returns:
            ids [n][tokens]; wall and cpu seconds; counters: growth of `read_counters`.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind as Kind

        given = {name: job[name] for name in ("temperature", "max_tokens", "ignore_eos")}
        given |= {"output_kind": Kind.DELTA if said else Kind.FINAL_ONLY, "detokenize": False}
        params = [SamplingParams(**given, seed=seed) for seed in job["seeds"]]
        counted, used = read_counters(self.llm.get_metrics()), cpu_seconds()
        began = time.perf_counter()
        engine, ids = self.llm.llm_engine, [list[int]() for _ in params]
        for index, (prompt, each) in enumerate(zip(job["prompts"], params)):
            engine.add_request(str(index), tokens_input(prompt), each)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index, new = int(output.request_id), list(output.outputs[0].token_ids)
                ids[index] += new
                if said is not None:
                    said(index, new)
        wall = time.perf_counter() - began
        cpu = cpu_seconds() - used
        counters = dict(read_counters(self.llm.get_metrics()) - counted)
        if self.stopwatch is not None:
            counters |= zip(DRAFTING, self.stopwatch.take())
        return {"ids": ids, "wall": wall, "cpu": cpu, "counters": counters}


def main(make: type[Answering] = Answering) -> None:
    """Make the engine, and answer the pipe that this process was started with until it ends."""
    # Exit normally, so that temporary files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # All other output goes to the log: this pipe is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        engine = make(json.loads(sys.stdin.readline()))
        say(engine.facts())
        for job in map(json.loads, sys.stdin):
            said = (lambda *new: say({"said": new})) if job.get("stream") else None
            say(engine.answer(job, said))
    except Exception as error:
        say({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        raise


if __name__ == "__main__":
    main()
