"""The runner of the GPU list: after any step the next one runs, and all is on record."""

from __future__ import annotations

import json
import os
import shlex

import pytest
import run_gpu_suite
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


FOLDERS = ("benchmarks/", "examples/", "tests/")


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
    assert len(names) == len(set(names))
    for step in PARTS[part]:
        assert step.estimate < step.limit
        files = [word for word in shlex.split(step.words) if word.startswith(FOLDERS)]
        assert all((ROOT / file).exists() for file in files), step.name
