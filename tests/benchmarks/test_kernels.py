"""Benchmarks of kernels: times of ways that do the same work, and random trees that find a bug."""

from __future__ import annotations

import json

import kernel_times
import pytest
import torch
from fuzz_kernels import fuzz
from lib import kernel_cases
from lib.fuzz_cases import LOOPS
from support.scripts import command
from vllm_specblock.triton_kernels import optional_numba

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", kernel_cases.cases(kernel_cases.TINY, CPU), ids=lambda c: c.shape)
def test_every_way_computes_the_same(case):
    assert len(case.ways) >= 2 and case.moved > 0
    with torch.inference_mode():
        ours, *others = (way() for way in case.ways.values())
    for other in others:
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_the_command_on_a_cpu(tmp_path):
    path = tmp_path / "k.json"
    run = command(kernel_times.main, "--device", "cpu", "--out", path)
    assert run.exit_code == 0, run.output
    results = json.loads(path.read_text())["results"].values()
    assert {each["kernel"] for each in results} == {"tree attention", "linear, 8 bits"}
    assert all(way["median_us"] > 0 for each in results for way in each["ways"].values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_call_takes_as_long_as_its_bytes():
    """A copy of 1 GiB reaches most of the peak, and never more than it."""
    source = torch.empty(1 << 29, dtype=torch.int8, device="cuda")
    copy = torch.empty_like(source)
    device = torch.device("cuda")
    found = kernel_times.time_call(lambda: copy.copy_(source), device, 1 << 30)
    assert 0.4 < found["share"] < 1.05


@pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")
@pytest.mark.parametrize("kernel", LOOPS)
def test_random_trees(kernel):
    found = fuzz(LOOPS[kernel], trees=40, seed=7)
    assert found["trees"] >= 40 and found["cases"] > 5
    assert not found["wrong"], found["wrong"][0]
