"""How long the GPU waits in a decode step, where, and for what.

    python benchmarks/gpu_idle.py --batch 8

runs the example pair, profiles 50 steps in which every request decodes, and says in text: the
share of a step in which the device runs nothing, the longest gaps with what ran before and
after, what the parts of a step take, and how much they launch. Without a GPU, a torch operation
counts as what the device runs: that shows where a step's time goes, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples/tiny_pair"
STEP = "target: inputs and forward"
PARTS = {"execute_model": STEP, "sample_tokens": "sampling, verdict and drafting"}
DRAFTING = "drafting"
WHOLE = "a step"
WARM_UP = 8
"""Steps before those that are profiled: prompts, and first calls of a shape."""


@dataclass(frozen=True)
class Gap:
    """A time in which the device ran nothing.

    Attributes:
        us: its length, microseconds.
        before, after: names of what ran on both sides.
    """

    us: float
    before: str
    after: str


@dataclass(frozen=True)
class Summary:
    """What a trace says of its steps, each of which lasts until the next one begins.

    Attributes:
        step_us: microseconds of every step.
        idle: share of every step in which the device ran nothing, 0 … 1.
        gaps: over all steps, the longest first.
        parts: microseconds per step, on average, from a part's first operation to its last.
        launches: what the device ran per step, on average, in each part, and under "a step" in all.
    """

    step_us: list[float]
    idle: list[float]
    gaps: list[Gap]
    parts: dict[str, float]
    launches: dict[str, float]

    def text(self, device: str, gaps: int = 8) -> str:
        """For people; `gaps` is how many are shown."""
        step, idle = statistics.median(self.step_us), statistics.median(self.idle)
        lines = [
            f"{len(self.step_us)} steps on {device}: {step / 1000:.3f} ms (median)",
            f"busy {1 - idle:.1%}, idle {idle:.1%} of a step (median; worst {max(self.idle):.1%})",
            "",
            "ms per step   share   launches   part",
        ]
        mean = statistics.mean(self.step_us)
        for name, us in self.parts.items():
            count = self.launches[name]
            lines.append(f"{us / 1000:11.3f}  {us / mean:6.1%}   {count:8.1f}   {name}")
        lines.append(f"{mean / 1000:11.3f}  {1:6.1%}   {self.launches[WHOLE]:8.1f}   {WHOLE}")
        lines += ["", "longest gaps (µs), and what ran before and after"]
        for gap in self.gaps[:gaps]:
            lines.append(f"{gap.us:8.1f}   {gap.before[:48]} … {gap.after[:48]}")
        return "\n".join(lines)


def summarise(events: Iterable[dict[str, Any]]) -> Summary:
    """Read the events of a Chrome trace as torch.profiler writes it.

    Kernels, copies and fills are what the device runs, and the ranges are those that the device
    spent in them; in a trace without any, torch's operations and the host's ranges stand in.

    Raises:
        ValueError: fewer than two steps.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    of_gpu = {"kernel", "gpu_memcpy", "gpu_memset"}
    on_gpu = any(event.get("cat") in of_gpu for event in timed)
    busy, marks = (of_gpu, "gpu_user_annotation") if on_gpu else ({"cpu_op"}, "user_annotation")
    ran = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in timed
        if event.get("cat") in busy
    )
    ranges = [event for event in timed if event.get("cat") == marks]
    begins = sorted(event["ts"] for event in ranges if event["name"] == STEP)
    if len(begins) < 2:
        raise ValueError(f"The trace holds {len(begins)} steps, and a step ends with the next.")

    gaps: list[tuple[float, float, Gap]] = []
    end, last = begins[0], "the profile's beginning"
    for start, stop, name in ran:
        if start > end:
            gaps.append((end, start, Gap(start - end, last, name)))
        if stop > end:
            end, last = stop, name
    if begins[-1] > end:
        gaps.append((end, begins[-1], Gap(begins[-1] - end, last, "the profile's end")))

    lengths = [after - before for before, after in pairwise(begins)]
    waited = [0.0] * len(lengths)
    found = []
    for start, stop, gap in gaps:
        first = max(0, bisect_left(begins, start) - 1)
        for step in range(first, len(lengths)):
            inside = min(stop, begins[step + 1]) - max(start, begins[step])
            if inside > 0:
                waited[step] += inside
            if begins[step + 1] >= stop:
                break
        if stop > begins[0] and start < begins[-1]:
            found.append(gap)
    starts = [start for start, _, _ in ran]

    def launched(after: float, before: float) -> float:
        return (bisect_left(starts, before) - bisect_left(starts, after)) / len(lengths)

    parts: dict[str, float] = {}
    launches = {WHOLE: launched(begins[0], begins[-1])}
    for event in ranges:
        name, begin, us = event["name"], event["ts"], event["dur"]
        if begins[0] <= begin < begins[-1] and name in (*PARTS.values(), DRAFTING):
            parts[name] = parts.get(name, 0.0) + us / len(lengths)
            launches[name] = launches.get(name, 0.0) + launched(begin, begin + us)
    return Summary(
        lengths,
        [wait / length for wait, length in zip(waited, lengths)],
        sorted(found, key=lambda gap: -gap.us),
        dict(sorted(parts.items(), key=lambda part: -part[1])),
        launches,
    )


def mark(owner: Any, name: str, part: str) -> None:
    """Show every call of `owner.name` in the trace as `part`."""
    from torch.profiler import record_function

    original = getattr(owner, name)

    def marked(*args, **kwargs):
        with record_function(part):
            return original(*args, **kwargs)

    setattr(owner, name, marked)


class Profile:
    """Profiles some of the calls of a function: `steps` and one more, after `WARM_UP`."""

    def __init__(self, profiler: Any, steps: int):
        self.profiler, self.steps, self.calls = profiler, steps, 0

    def around(self, step: Callable) -> Callable:
        def counted(*args, **kwargs):
            if self.calls == WARM_UP:
                self.profiler.start()
            self.calls += 1
            result = step(*args, **kwargs)
            if self.calls == WARM_UP + self.steps + 1:
                self.profiler.stop()
            return result

        return counted

    @property
    def done(self) -> bool:
        return self.calls > WARM_UP + self.steps


def profile(
    target: str, speculative: dict[str, Any], batch: int, steps: int, engine: dict[str, Any]
) -> list[dict[str, Any]]:
    """The events of a trace over `steps` decode steps and the beginning of one more.

    Args:
        speculative: vLLM's `speculative_config`.
        batch: requests at a time.
        engine: further arguments of `LLM`.

    Raises:
        RuntimeError: the requests were done before.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "model": target,
        "speculative_config": speculative,
        "max_model_len": 1024,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
    }
    llm = LLM(**settings | engine)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    taken = Profile(torch.profiler.profile(activities=activities), steps)
    mark(runner.speculator, "propose", DRAFTING)
    for name, part in PARTS.items():
        mark(runner, name, part)
    runner.execute_model = taken.around(runner.execute_model)
    length = llm.model_config.max_model_len - 16
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
    prompts = [{"prompt_token_ids": [3 + index, 5, 7, 11]} for index in range(batch)]
    llm.generate(prompts, params, use_tqdm=False)
    if not taken.done:
        raise RuntimeError(
            f"All requests were done after {taken.calls} steps, and {WARM_UP + steps + 1} were to "
            "be seen: ask for fewer --steps, or a longer max_model_len by --engine."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        taken.profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def main(arguments: list[str] | None = None) -> Summary:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(EXAMPLES / "target"))
    parser.add_argument("--drafter", default=str(EXAMPLES / "drafter"))
    parser.add_argument("--nodes", type=int, default=24, help="of every tree")
    parser.add_argument("--batch", type=int, default=8, help="requests at a time")
    parser.add_argument("--steps", type=int, default=50, help="that are profiled")
    parser.add_argument("--speculative", type=json.loads, default={}, help="more, as JSON")
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of LLM, as JSON")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    speculative = {
        "method": "specblock",
        "model": given.drafter,
        "num_speculative_tokens": given.nodes,
        **given.speculative,
    }
    events = profile(given.target, speculative, given.batch, given.steps, given.engine)
    summary = summarise(events)
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "a CPU (operations stand in for kernels)"
    print(summary.text(f"{device}, batch {given.batch}, {given.nodes} nodes"))
    if given.json:
        given.json.write_text(json.dumps({"device": device, **asdict(summary)}, indent=1) + "\n")
    return summary


if __name__ == "__main__":
    main()
