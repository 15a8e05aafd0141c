"""Kernels: whether Triton compiles them, Numba stands in, or they are interpreted."""

from __future__ import annotations

import os
import shutil

from vllm_specblock.engine.doctor.finding import Finding, wrong
from vllm_specblock.engine.doctor.versions import installed

COMPILERS = ("gcc", "clang", "cc")
"""Triton compiles with one of them what launches a kernel."""


def kernels() -> Finding:
    """What runs them on this machine."""
    import torch

    if torch.cuda.is_available():
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
        if compiler is None:
            return wrong(
                "kernels",
                f"{name}, and no C compiler",
                f"Triton needs one to launch kernels: install {' or '.join(COMPILERS[:2])}, or "
                "name one in CC.",
            )
        return Finding("kernels", f"Triton compiles them for sm_{major}{minor} ({name})")
    found = installed("vllm")
    if found is not None and "cpu" not in found:
        return wrong(
            "kernels",
            "vLLM's CUDA build, and no GPU answers",
            "Look at nvidia-smi and CUDA_VISIBLE_DEVICES, or install vLLM's CPU build.",
        )
    from vllm_specblock.triton_kernels.optional_numba import AVAILABLE

    if not AVAILABLE:
        return Finding(
            "kernels",
            "Triton's interpreter: right, and 10 to 100 times slower",
            "note",
            "Install numba, whose loops stand in for them on a CPU.",
        )
    tiles = "with" if torch.cpu._is_amx_tile_supported() else "without"
    return Finding(
        "kernels", f"Numba {installed('numba')} compiles loops for this CPU, {tiles} AMX"
    )
