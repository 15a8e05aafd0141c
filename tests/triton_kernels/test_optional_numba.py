"""Machine code of compiled loops is kept, and dropped with a change of what it was made from."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from support.attention import Tree, make_batch

pytest.importorskip("numba")

from vllm_specblock.triton_kernels.attention.cpu_attention_loop import share
from vllm_specblock.triton_kernels.attention.cpu_packing import packing_of

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


def test_attention_is_kept():
    batch = make_batch([Tree(40, 3)], group=1, head_size=32, block_size=32)
    cache = torch.zeros_like(batch.kv_cache.transpose(1, 2).contiguous()).transpose(1, 2)
    out, packing = torch.empty_like(batch.query), packing_of(cache, False)
    batch.queries().attend(batch.query, cache, 1.0, out, packing=packing)
    assert list(Path(share.stats.cache_path).glob("cpu_attention_loop.share-*.nbc"))
