"""Run a Python program on the emulated GPU.

    PYTHON tests/emulated_gpu/run.py [FLAG …] SCRIPT|-m MODULE [ARGUMENT …]

PYTHON belongs to an environment with vLLM's CUDA build, and `make` here has run with it.
README.md says what the flags do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLAGS = (
    "--lazy", "--poison", "--bounds", "--shuffle", "--host-forms", "--trace", "--trace-all",
    "--skip-kernels",
)  # fmt: skip


def environment() -> dict[str, str]:
    """Variables by which a process, and those that it starts, find the device."""
    build = ROOT / "build/emulated_gpu" / Path(sys.prefix).name
    # `sitecustomize.py` is in `path`.
    paths = [HERE / "path", build, os.environ.get("PYTHONPATH", "")]
    libraries = [build, os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_PRELOAD": str(build / "libemucudart.so"),
        "LD_LIBRARY_PATH": os.pathsep.join(str(each) for each in libraries if str(each)),
        "PYTHONPATH": os.pathsep.join(str(each) for each in paths if str(each)),
        "EMULATED_GPU": "1",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # The steps that vLLM times at the start have a short context.
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN": "16",
        # Releases replace each other's entries, and importing each model's file takes 10 s.
        "VLLM_CACHE_ROOT": str(build / "cache"),
        # An adapter's first product in 2 parts: nearly all of vLLM's 64 have no work.
        "VLLM_TUNED_CONFIG_FOLDER": str(HERE / "tuned"),
        "CUDA_MODULE_LOADING": "LAZY",
    }


def main() -> None:
    arguments, settings = sys.argv[1:], {}
    while arguments and arguments[0] in FLAGS:
        settings["EMU_" + arguments.pop(0)[2:].upper().replace("-", "_")] = "1"
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        raise SystemExit(__doc__)
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | environment() | settings)


if __name__ == "__main__":
    main()
