"""What kernels take of GPUs that are not there; `compile_launches.py` writes the table."""

from __future__ import annotations

import json
from pathlib import Path

from support.scripts import load_script

compiled = load_script(Path(__file__).with_name("compile_launches.py"))
TABLE = json.loads(compiled.TABLE.read_text())


def test_every_launch_fits_its_gpu_and_the_loops_keep_their_registers():
    assert not compiled.faults(TABLE["launches"])
    for name in compiled.LOOPS:
        rows = [row for row in TABLE["launches"] if row["kernel"].endswith(f".{name}")]
        assert {row["architecture"] for row in rows} == compiled.SHARED.keys(), name


def test_the_table_is_of_the_kernels_as_they_are():
    assert TABLE["code"] == compiled.code_hash(), "run tests/emulated_gpu/compile_launches.py"
