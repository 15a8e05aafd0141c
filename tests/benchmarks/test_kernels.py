"""Benchmarks of kernels: times of ways that do the same work, and random trees that find a bug."""

from __future__ import annotations

import json
import sys

import fuzz_kernels
import kernel_times
import pytest
import torch
import typer
from fuzz_kernels import fuzz, main
from lib import kernel_cases
from lib.fuzz_cases import LOOPS, Case
from typer.testing import CliRunner
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
    app = typer.Typer()
    app.command()(kernel_times.main)
    path = tmp_path / "k.json"
    run = CliRunner().invoke(app, ["--device", "cpu", "--out", str(path)])
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


loops = pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")
LAUNCHED = {
    "verification: store, mask, walk": {"_build_tree_mask_kernel", "_accept_path_kernel"},
    "commit: keys and values move": {"_move_path_kernel"},
    "selection of nodes": {"_select_kernel"},
    "growth of SpecBlock trees": {"_attach_and_select_kernel"},
    "n-gram trees": {"_occurrences_kernel", "_follow_kernel"},
    "merging of two trees": {"_merge_kernel"},
    "routing, best paths": {"_store_trees_kernel"},
    "attention over paged caches": {"_tree_attention_kernel"},
}


@loops
@pytest.mark.parametrize("kernel", LOOPS)
def test_random_trees(kernel):
    found = fuzz(LOOPS[kernel], trees=40, seed=7)
    assert found["trees"] >= 40 and found["cases"] > 5
    assert not found["wrong"], found["wrong"][0]


def spoilt(case: Case) -> Case:
    """The compiled form's last result is another one."""

    def call():
        *rest, last = case.call()
        return (*rest, last + 1 if optional_numba.AVAILABLE else last)

    return case._replace(call=call)


@loops
@pytest.mark.parametrize("kernel", ["commit: keys and values move", "attention over packed caches"])
def test_what_differs_is_found(kernel, tmp_path, monkeypatch, capsys):
    make = LOOPS[kernel]
    monkeypatch.setitem(LOOPS, kernel, lambda *draws: spoilt(make(*draws)))
    with pytest.raises(fuzz_kernels.typer.Exit) as ended:
        main(trees=10, seed=0, kernel=[kernel], out=tmp_path / "new" / "fuzz.json")
    assert ended.value.exit_code == 1
    kept = json.loads((tmp_path / "new/fuzz.json").read_text())["kernels"][kernel]
    first = kept["wrong"][0]
    assert f"{kernel}, case {first['case']}: {first['said']}" in capsys.readouterr().out


def test_kernels_under_the_interpreter(tmp_path):
    """In a process of its own: what was decided about kernels here is not undone."""
    pytest.importorskip("triton")
    out = tmp_path / "fuzz.json"
    command = [sys.executable, fuzz_kernels.__file__, "--triton", "--trees=3", "--seed=7"]
    fuzz_kernels.subprocess.run([*command, f"--out={out}"], check=True)
    found = json.loads(out.read_text())["kernels"]
    assert found.keys() == LAUNCHED.keys()
    for name, kernels in LAUNCHED.items():
        assert found[name]["trees"] >= 3 and not found[name]["wrong"]
        assert kernels <= found[name]["launches"].keys(), name
