"""The GPU list: after any step the next one runs; its profile's summary, on traces by hand."""

from __future__ import annotations

import json
import os
import shlex

import pytest
import run_gpu_suite
from gpu_idle import DRAFTING, STEP, page, summarise
from run_gpu_suite import PARTS, RESULT, ROOT, Step
from support.adapting import wait
from support.processes import alive

ENDS = "import json, sys; print('said'); json.dump({'us': 5}, open(sys.argv[1], 'w'))"
OVERRUNS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
json.dump({"child": child.pid}, open(sys.argv[1], "w"))
time.sleep(600)
"""


def test_steps_that_end_fail_and_overrun(tmp_path):
    steps = [
        Step("overruns", shlex.join(["-c", OVERRUNS, RESULT]), 1, 2),
        Step("fails", "-c 'raise SystemExit(3)'", 1, 20),
        Step("ends", shlex.join(["-c", ENDS, RESULT]), 1, 20),
    ]
    log, figures = tmp_path / "part.log", tmp_path / "part.json"
    summary = run_gpu_suite.run(steps, log, figures, 60)
    assert [each["exit"] for each in summary] == ["overran", 3, 0]
    assert 2 <= summary[0]["seconds"] < 10
    found = json.loads(figures.read_text())
    assert found["summary"] == summary and found["results"]["ends"] == {"us": 5}
    assert "\nsaid\n" in log.read_text() and "fails: 3" in log.read_text()
    child = found["results"]["overruns"]["child"]
    wait(lambda: not alive(child))
    assert alive(os.getpid())


@pytest.mark.parametrize("part", [1, 2, 3, 5])
def test_the_list_fits_and_names_what_is_there(part):
    assert sum(step.estimate for step in PARTS[part]) <= 9 * 60
    names = [step.name for step in PARTS[part]]
    folders = "benchmarks/", "examples/", "tests/"
    assert len(names) == len(set(names))
    for step in PARTS[part]:
        assert step.estimate < step.limit
        files = [word for word in shlex.split(step.words) if word.startswith(folders)]
        assert all((ROOT / file).exists() for file in files), step.name


def event(cat: str, name: str, ts: float, dur: float) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_idle_time_of_each_step():
    """Two steps of 100 and 200 µs, and the beginning of a third."""
    mark, kernel = "gpu_user_annotation", "kernel"
    on_gpu = [
        {"ph": "M", "name": "process_name"},
        event(mark, STEP, 1000, 60),
        event(kernel, "gemm", 1000, 40),
        event(kernel, "attention", 1030, 20),  # on another stream: 10 µs at the same time
        event("gpu_memcpy", "copy", 1055, 5),  # 5 µs after nothing
        event(mark, DRAFTING, 1060, 30),
        event(kernel, "draft", 1060, 30),
        # 10 µs of nothing up to the next step, and 40 µs more at its beginning: one gap of 40.
        event(mark, STEP, 1100, 100),
        event(kernel, "gemm", 1130, 100),
        event(mark, DRAFTING, 1230, 70),
        event(kernel, "draft", 1230, 70),
        event(mark, STEP, 1300, 50),
        event(kernel, "gemm", 1310, 40),  # not of the two
        event("cpu_op", "aten::mm", 990, 400),  # the host's time is not the device's
        event("user_annotation", STEP, 900, 10),
    ]
    summary = summarise(on_gpu)
    assert summary["step_us"] == [100, 200]
    # 5 between two kernels and 10 at the end; 30 at the beginning.
    assert summary["idle"] == pytest.approx([0.15, 0.15])
    gaps = [tuple(gap.values()) for gap in summary["gaps"]]
    assert gaps == [(40, "draft", "gemm"), (5, "attention", "copy")]
    assert summary["parts"] == {STEP: 80, DRAFTING: 50}
    assert summary["launches"] == {"a step": 3, STEP: 2, DRAFTING: 1}
    text = page(summary, "a GPU")
    assert "2 steps on a GPU: 0.150 ms" in text
    assert "idle 15.0%" in text
    assert "40.0   draft … gemm" in text
    assert "0.050   33.3%        1.0   drafting" in text
