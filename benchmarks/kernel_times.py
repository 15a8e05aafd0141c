"""Tree attention against FlashAttention and torch, 8-bit linear layers against full ones.

    python benchmarks/kernel_times.py [--help]

On a GPU: bf16, shapes of an 8B target, CUDA graph replays, the L2 flushed between two. On a CPU the
same code runs tiny, in float32, as a test of itself.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lib.kernel_cases import LARGE, TINY, Case, cases
from lib.results_store import MEASURED, ResultsStore, device_name, markdown_table

BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}
"""Peak bytes/s of a GPU's memory (SXM, the largest variant), by a part of its name."""
WARM_UP, CPU_CALLS = 3, 5
GOAL = 1.10
"""Tree attention over FlashAttention's time on a causal chain of the same size, at most."""


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes/s, or None for a device that is not in `BANDWIDTH`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BANDWIDTH.items() if part in name), None)


def time_call(call: Callable[[], Any], device: torch.device, moved: int) -> dict[str, Any]:
    """Time a call that moves so many bytes.

    On a GPU replays of its CUDA graph are timed, without launch time and with a cold L2; on a CPU
    the wall clock, with warm caches.

    Returns:
        the median in µs, 10^9 bytes/s, and their share of the device's peak (None: unknown).
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        median = 1e3 * do_bench(captured(call).replay, return_mode="median")
    else:
        took = timeit.repeat(call, number=1, repeat=WARM_UP + CPU_CALLS)
        median = 1e6 * statistics.median(took[WARM_UP:])
    peak, rate = peak_bandwidth(device), moved / (median * 1e-6)
    share = rate / peak if peak else None
    return {"median_us": median, "bytes": moved, "gb_s": rate / 1e9, "share": share}


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture wants everything compiled and allocated before
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Every way's time and bandwidth, and ours over each of the others."""
    found = {name: time_call(way, device, case.moved) for name, way in case.ways.items()}
    ours = found["ours"]["median_us"]
    ratio = {name: ours / each["median_us"] for name, each in found.items() if name != "ours"}
    return {"kernel": case.kernel, "shape": case.shape, "ways": found, "ours_over": ratio}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row per case and way; where there is a goal it stands beside the figure."""
    rows = [["kernel", "shape", "way", "µs", "GB/s", "of peak", "ours / this"]]
    for case in results.values():
        for name, each in case["ways"].items():
            share = "–" if each["share"] is None else f"{each['share']:.0%}"
            over = case["ours_over"].get(name)
            ratio = "–" if over is None else f"{over:.2f}"
            if "FlashAttention" in name:
                ratio += f" (goal ≤ {GOAL:.2f}: {'met' if over <= GOAL else 'missed'})"
            times = f"{each['median_us']:.1f}", f"{each['gb_s']:.0f}"
            rows.append([case["kernel"], case["shape"], name, *times, share, ratio])
    return markdown_table(rows)


def main(
    device: Annotated[
        str, typer.Option(help="cuda, or cpu for a tiny run of the same code.")
    ] = "cuda" if torch.cuda.is_available() else "cpu",
    only: Annotated[str | None, typer.Option(help="A part of a kernel's name.")] = None,
    splits: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Also attend in splits of so many entries. Repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON of the results.")] = MEASURED / "kernels.json",
) -> None:
    """Time every kernel, print a table, write JSON."""
    where = torch.device(device)
    sizes = TINY if where.type == "cpu" else LARGE
    settings = {
        "device": device_name(where),
        "tiny": sizes is TINY,
        "dtype": str(sizes.dtype),
        "splits": splits or [],
    }
    store = ResultsStore(out, settings)
    for case in cases(sizes, where, splits or []):
        name = f"{case.kernel}, {case.shape}"
        if name in store or (only is not None and only not in case.kernel):
            continue
        with torch.inference_mode():
            store.add(name, measure(case, where))
    print(f"{settings}\n\n{table(store.results)}")


if __name__ == "__main__":
    typer.run(main)
