"""A smoke test of the emulated GPU: the device's own checks, and a kernel of ours on it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-cuda/bin/python"
KERNEL = "tests/triton_kernels/verify/test_accept_path.py"


@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-cuda: make test-emulated-gpu builds it")
def test_the_device_and_a_kernel():
    subprocess.run(["make", "-s", f"PYTHON={PYTHON}"], cwd=HERE, check=True)
    device = ["--poison", "-m", "pytest", str(HERE / "checks/check_device.py")]
    kernel = ["--lazy", "--poison", "--bounds", "--shuffle", "-m", "pytest", KERNEL, "-k", "cuda"]
    for command in (device, kernel):
        done = subprocess.run(
            [PYTHON, HERE / "run.py", *command, "-q", "-p", "no:cacheprovider"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
