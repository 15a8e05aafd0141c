"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Return the processor, the cores and threads of this process, and the GPU (None: none)."""
    import torch

    gpu = None
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "gpu": gpu,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
