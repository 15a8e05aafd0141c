"""What kernels take of GPUs that are not there; `compile_launches.py` writes the table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_launch_fits_its_gpu_and_the_loops_keep_their_registers():
    spec = importlib.util.spec_from_file_location("compiled", HERE / "compile_launches.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = json.loads(module.TABLE.read_text())
    assert not module.faults(table)
    for name in module.LOOPS:
        compiled = {row["architecture"] for row in table if row["kernel"].endswith(f".{name}")}
        assert compiled == module.SHARED.keys(), name
