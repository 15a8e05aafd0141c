"""Served figures: which engines and questions there are, and what the first steps are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import never_slower
import psutil
from never_slower import ENGINES, default_methods
from support.engines import DRAFTER, TARGET

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.bench.methods import resolve


def test_every_engine_is_one_that_vllm_can_be_asked_for():
    names = default_methods(DRAFTER, DRAFTER, fixed=True)
    assert {*names} == {*ENGINES, "plain", "plain-v2"}
    assert {*default_methods(None, None, fixed=False)} == {
        *("plain", "plain-v2", "ngram", "vllm-ngram", "vllm-suffix")
    }
    config = BenchConfig(
        **{"target": TARGET, "set": ("-",), "method": names, "define": ENGINES},
        drafter={"specblock": DRAFTER, "eagle3": DRAFTER},
    )
    found = resolve(config)
    assert found["ngram"].speculative == {"method": "specblock", "kind": "ngram"}
    fixed = found["merged-24"].speculative
    assert fixed["num_speculative_tokens"] == 24 and fixed["draft_policy"] == "merge"
    assert fixed["enable_adaptive_verification"] is False
    assert found["vllm-ngram"].speculative["method"] == "ngram"


def test_a_neighbour_ends_with_its_benchmark():
    """Also with one that was killed."""
    code = (
        "import time, neighbour\nwith neighbour.neighbour():\n    print(flush=True); time.sleep(99)"
    )
    folder = Path(never_slower.__file__).parent / "lib"
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE)
    killed.stdout.readline()
    busy = psutil.Process(killed.pid).children()
    assert len(busy) == len(os.sched_getaffinity(0))
    killed.kill()
    killed.wait()
    assert not psutil.wait_procs(busy, timeout=30)[1]
