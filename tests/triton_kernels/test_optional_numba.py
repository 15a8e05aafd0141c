"""Machine code of compiled loops is kept, and dropped with a change of what it was made from."""

from __future__ import annotations

import importlib.util
import os

import pytest

pytest.importorskip("numba")


LOOP = """
from numba import njit as plain
from vllm_specblock.triton_kernels.optional_numba import njit

inner = plain(lambda x: x + 1)

@njit
def loop(x):
    return inner(x)
"""


def test_a_changed_neighbour_counts(tmp_path):
    def run() -> tuple[int, int]:
        spec = importlib.util.spec_from_file_location("loops", tmp_path / "loops.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.loop(1), sum(module.loop.stats.cache_hits.values())

    (tmp_path / "loops.py").write_text(LOOP)
    (tmp_path / "neighbour.py").touch()
    assert run() == (2, 0)
    assert run() == (2, 1)
    os.utime(tmp_path / "neighbour.py", ns=(1, 1))
    assert run() == (2, 0)
