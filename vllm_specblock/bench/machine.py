"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, GPU (None: none), and threads that are asked
    for."""
    import torch

    gpu = None
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "gpu": gpu,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _processor() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_memory() -> int | None:
    """Bytes of host memory that new processes may take; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) << 10 if found else None
