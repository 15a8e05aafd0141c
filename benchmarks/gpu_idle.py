"""How long the GPU is idle in a decode step, where, and why.

    python benchmarks/gpu_idle.py --batch 8

Serves the example pair, profiles 50 steps in which every request decodes, and prints the share of a
step in which the device is idle, the longest gaps with the operations around them, and the time and
launches of a step's parts. Without a GPU, torch operations stand in for kernels: that shows where a
step's time goes, and nothing about a GPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import pair
from lib.in_process import runner_of
from lib.results_store import write_results

STEP = "target: inputs and forward"
PARTS = {"execute_model": STEP, "sample_tokens": "sampling, verdict and drafting"}
DRAFTING = "drafting"
WHOLE = "a step"
WARM_UP = 8
"""Steps before those that are profiled: prompts, and first calls of a shape."""


def page(summary: dict[str, Any], device: str, gaps: int = 8) -> str:
    """Return what `summarise` found as a page with the `gaps` longest gaps."""
    steps, idle = summary["step_us"], summary["idle"]
    mean = statistics.mean(steps)
    lines = [
        f"{len(steps)} steps on {device}: {statistics.median(steps) / 1000:.3f} ms (median)",
        f"idle {statistics.median(idle):.1%} of a step (median; worst {max(idle):.1%})",
        "",
        "ms per step   share   launches   part",
    ]
    for name, us in (summary["parts"] | {WHOLE: mean}).items():
        count = summary["launches"][name]
        lines.append(f"{us / 1000:11.3f}  {us / mean:6.1%}   {count:8.1f}   {name}")
    lines += ["", "longest gaps (µs), and what ran before and after"]
    for gap in summary["gaps"][:gaps]:
        lines.append(f"{gap['us']:8.1f}   {gap['before'][:48]} … {gap['after'][:48]}")
    return "\n".join(lines)


def summarise(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Read the events of a Chrome trace as torch.profiler writes it.

    The device runs kernels, copies and fills, in ranges of its own clock; in a trace without any,
    torch's operations and the host's ranges stand in. A step lasts until the next one begins.

    Returns:
        step_us: microseconds of every step; idle: idle share of each, 0 … 1; gaps: idle times of
        the device (µs) and the operations around them, the longest first; parts: mean microseconds
        per step, from a part's first operation to its last; launches: mean launches per step, in
        each part and in all (`WHOLE`).
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
    steps = [*pairwise(begins)]

    gaps: list[tuple[float, float, str, str]] = []
    end, last = begins[0], "the profile's beginning"
    for start, stop, name in [*ran, (begins[-1], begins[-1], "the profile's end")]:
        if end < start and end < begins[-1]:
            gaps.append((end, start, last, name))
        if stop > end:
            end, last = stop, name
    idle = [
        sum(max(0.0, min(stop, after) - max(start, before)) for start, stop, *_ in gaps)
        / (after - before)
        for before, after in steps
    ]
    shown = [{"us": stop - start, "before": a, "after": b} for start, stop, a, b in gaps]
    starts = [start for start, _, _ in ran]

    def launched(after: float, before: float) -> float:
        return (bisect_left(starts, before) - bisect_left(starts, after)) / len(steps)

    parts: dict[str, float] = {}
    launches = {WHOLE: launched(begins[0], begins[-1])}
    for event in ranges:
        name, begin, us = event["name"], event["ts"], event["dur"]
        if begins[0] <= begin < begins[-1] and name in (*PARTS.values(), DRAFTING):
            parts[name] = parts.get(name, 0.0) + us / len(steps)
            launches[name] = launches.get(name, 0.0) + launched(begin, begin + us)
    return {
        "step_us": [after - before for before, after in steps],
        "idle": idle,
        "gaps": sorted(shown, key=lambda gap: -gap["us"]),
        "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
        "launches": launches,
    }


def profile(arguments: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Return the events of a trace over `steps` decode steps and the beginning of one more."""
    import torch
    from torch.profiler import ProfilerActivity, record_function
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    runner = runner_of(llm)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    # Shows every call of a method in the trace.
    propose = runner.speculator.propose
    runner.speculator.propose = record_function(DRAFTING)(propose)
    for name, part in PARTS.items():
        setattr(runner, name, record_function(part)(getattr(runner, name)))
    execute, calls = runner.execute_model, 0

    def counted(*args, **kwargs):
        nonlocal calls
        if calls == WARM_UP:
            profiler.start()
        calls += 1
        result = execute(*args, **kwargs)
        if calls == WARM_UP + steps + 1:
            profiler.stop()
        return result

    runner.execute_model = counted
    length = llm.model_config.max_model_len - 16
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
    batch = range(arguments["max_num_seqs"])
    prompts = [{"prompt_token_ids": [3 + index, 5, 7, 11]} for index in batch]
    llm.generate(prompts, params, use_tqdm=False)
    if calls <= WARM_UP + steps:
        raise RuntimeError(
            f"All requests ended after {calls} steps, but {WARM_UP + steps + 1} are profiled: give "
            "fewer --steps, or a longer max_model_len by --engine."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def main(
    nodes: Annotated[int, typer.Option(help="Of every tree.")] = 24,
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps to profile.")] = 50,
    engine: Annotated[str, typer.Option(help="More arguments of LLM, as JSON.")] = "{}",
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the figures.")] = None,
) -> None:
    """Profile decode steps and print what the device waits for."""
    import torch

    arguments = {
        "model": str(pair.TARGET),
        "speculative_config": {
            "method": "specblock",
            "model": str(pair.DRAFTER),
            "num_speculative_tokens": nodes,
        },
        "max_model_len": 1024,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
    }
    summary = summarise(profile(arguments | json.loads(engine), steps))
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "a CPU (operations stand in for kernels)"
    print(page(summary, f"{device}, batch {batch}, {nodes} nodes"))
    if json_file:
        write_results(json_file, {"device": device, **summary})


if __name__ == "__main__":
    typer.run(main)
