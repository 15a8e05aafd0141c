"""Time of one call on a device, with cold caches, and its share of the memory's bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}
"""Peak bytes/s of a GPU's memory (SXM, the largest variant), by a part of its name."""
FLUSH_BYTES = 256 << 20
"""Written between two calls: more than any L2 holds, and long enough for the host to be ahead."""
WARM_UP = 3
Timing = dict[str, Any]


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes/s, or None for a device that is not in `BANDWIDTH`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BANDWIDTH.items() if part in name), None)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def time_call(call: Callable[[], Any], device: torch.device, runs: int, moved: int) -> Timing:
    """Time a call that moves so many bytes.

    On a GPU replays of its CUDA graph are timed, without launch time; on a CPU the wall clock, with
    warm caches.

    Returns:
        the median in µs, 10^9 bytes/s, and their share of the device's peak (None: unknown).
    """
    times = _replayed(call, runs) if device.type == "cuda" else _called(call, runs)
    median, peak = statistics.median(times), peak_bandwidth(device)
    rate = moved / (median * 1e-6)
    share = rate / peak if peak else None
    return {"median_us": median, "runs": runs, "bytes": moved, "gb_s": rate / 1e9, "share": share}


def _called(call: Callable[[], Any], runs: int) -> list[float]:
    for _ in range(WARM_UP):
        call()
    took = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e6)
    return took


def _replayed(call: Callable[[], Any], runs: int) -> list[float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture wants everything compiled and allocated before
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    pairs = []
    for _ in range(runs + WARM_UP):
        flush.zero_()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        graph.replay()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs[WARM_UP:]]
