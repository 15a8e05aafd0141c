"""A smoke test of the emulated GPU, and what kernels take of GPUs that are not there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.scripts import load_script

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


compiled = load_script(Path(__file__).with_name("compile_launches.py"))
TABLE = json.loads(compiled.TABLE.read_text())


def test_every_launch_fits_its_gpu_and_the_loops_keep_their_registers():
    assert not compiled.faults(TABLE["launches"])
    for name in compiled.LOOPS:
        rows = [row for row in TABLE["launches"] if row["kernel"].endswith(f".{name}")]
        assert {row["architecture"] for row in rows} == compiled.SHARED.keys(), name


def test_the_table_is_of_the_kernels_as_they_are():
    assert TABLE["code"] == compiled.code_hash(), "run tests/emulated_gpu/compile_launches.py"
