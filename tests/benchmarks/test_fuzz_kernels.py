"""Random trees through the kernels' forms for CPUs; and a bug that is put in is found."""

from __future__ import annotations

import json

import fuzz_kernels
import pytest
import torch
from fuzz_kernels import fuzz, main
from lib import fuzz_cases
from lib.fuzz_cases import CASES, Case
from vllm_specblock.triton_kernels import optional_numba

pytestmark = pytest.mark.skipif(not optional_numba.AVAILABLE, reason="Numba is not installed")


@pytest.mark.parametrize("kernel", CASES)
def test_random_trees(kernel):
    found = fuzz(CASES[kernel], trees=40, seed=7)
    assert found["trees"] >= 40 and found["cases"] > 5
    assert not found["wrong"], found["wrong"][0]


def spoilt(case: Case) -> Case:
    """The compiled form's last result is another one."""

    def call():
        *rest, last = case.call()
        return (*rest, last + 1 if optional_numba.AVAILABLE else last)

    return case._replace(call=call)


@pytest.mark.parametrize("kernel", ["commit: keys and values move", "attention over packed caches"])
def test_what_differs_is_found(kernel, tmp_path, monkeypatch, capsys):
    make = CASES[kernel]
    monkeypatch.setitem(CASES, kernel, lambda *draws: spoilt(make(*draws)))
    with pytest.raises(fuzz_kernels.typer.Exit) as ended:
        main(trees=10, seed=0, kernel=[kernel], out=tmp_path / "new" / "fuzz.json")
    assert ended.value.exit_code == 1
    kept = json.loads((tmp_path / "new/fuzz.json").read_text())["kernels"][kernel]
    first = kept["wrong"][0]
    assert f"{kernel}, case {first['case']}: {first['said']}" in capsys.readouterr().out


def test_a_case_comes_back():
    draws = [fuzz_cases.random.Random(5), torch.Generator().manual_seed(5)]
    again = [fuzz_cases.random.Random(5), torch.Generator().manual_seed(5)]
    for make in CASES.values():
        one, other = make(*draws).call(), make(*again).call()
        assert all(map(torch.equal, one, other))


def test_kernels_that_there_are_not():
    with pytest.raises(fuzz_kernels.typer.BadParameter, match="no kernel 'softmax'; there are"):
        main(kernel=["softmax"])
