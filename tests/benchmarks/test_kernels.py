"""The kernel benchmark: all ways of a case do the same work, and the figures are what they say."""

from __future__ import annotations

import json

import kernels
import pytest
import torch
from lib import kernel_cases, timing
from typer.testing import CliRunner

CPU = torch.device("cpu")


def in_place(case):
    """Whether the case works on memory of its own."""
    return case.kernel in ("commit", "recording")


@pytest.mark.parametrize("case", kernel_cases.cases(kernel_cases.TINY, CPU), ids=lambda c: c.shape)
def test_every_way_computes_the_same(case):
    assert len(case.ways) >= 2 and case.moved > 0
    if in_place(case):
        return
    with torch.inference_mode():
        ours, *others = (way() for way in case.ways.values())
    for other in others:
        if case.kernel != "tree selection":
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)
        else:
            for name in ours.tree.TENSORS:
                mine, theirs = (getattr(each.tree, name) for each in (ours, other))
                torch.testing.assert_close(mine, theirs, msg=name)
            assert (ours.tree.size > 3).all()


def test_recordings_leave_the_same(monkeypatch):
    made, empty = [], kernel_cases.SlabTensors.empty
    monkeypatch.setattr(
        kernel_cases.SlabTensors, "empty", lambda *args: made.append(empty(*args)) or made[-1]
    )
    for way in ("ours", "torch, all slabs rewritten"):
        torch.manual_seed(3)
        kernel_cases.record_case(kernel_cases.TINY, 2, CPU).ways[way]()
    one, other = (vars(slabs) for slabs in made)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (one["end"] == 4).all() and (one["steps"] == 1).all() and one["states"].any()


def test_commits_move_the_same(monkeypatch):
    made, caches = [], kernel_cases.KVCacheSet
    monkeypatch.setattr(kernel_cases, "KVCacheSet", lambda each: made.append(each) or caches(each))
    for way in ("ours", "torch, gather and scatter"):
        torch.manual_seed(3)
        case = kernel_cases.commit_case(kernel_cases.TINY, 2, CPU)
        before = [cache.clone() for cache in made[-1]]
        case.ways[way]()
        assert any(not torch.equal(old, new) for old, new in zip(before, made[-1]))
    assert all(torch.equal(mine, other) for mine, other in zip(*made))


def test_the_command_on_a_cpu(tmp_path):
    import typer

    app = typer.Typer()
    app.command()(kernels.main)
    path = tmp_path / "k.json"
    arguments = ["--device", "cpu", "--runs", "2", "--out", str(path)]
    first = CliRunner().invoke(app, [*arguments, "--only", "shift"])
    assert first.exit_code == 0, first.output
    assert len(json.loads(path.read_text())["results"]) == len(kernel_cases.TINY.rows)
    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0, second.output
    found = json.loads(path.read_text())
    assert found["settings"]["tiny"] is True
    assert {each["kernel"] for each in found["results"].values()} == {
        "tree attention",
        "layer shift",
        "linear, 8 bits",
        "commit",
        "tree selection",
        "recording",
    }
    for each in found["results"].values():
        assert all(way["median_us"] > 0 for way in each["ways"].values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replayed_call_takes_as_long_as_its_bytes():
    """A copy of 1 GiB reaches most of the peak, and never more than it."""
    source = torch.empty(1 << 29, dtype=torch.int8, device="cuda")
    copy = torch.empty_like(source)
    device = torch.device("cuda")
    found = timing.time_call(lambda: copy.copy_(source), device, 20).with_bytes(1 << 30, device)
    assert 0.4 < found["share"] < 1.05
