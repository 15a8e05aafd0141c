"""Families of targets: a handful is served again, all have a verdict in results.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from families import FAMILIES

HERE = Path(__file__).resolve().parent
RESULTS = json.loads((HERE / "results.json").read_text())
# Layers that share a cache, sinks, M-RoPE, latent attention, a layer that is not causal, and
# recurrent layers (Gated DeltaNet; the others are in tests/engine/test_hybrid_targets.py).
# `make targets` serves all.
SERVED = ["Gemma 4 E2B", "gpt-oss", "Qwen3-VL", "GLM-4.7 Flash", "HRM text", "Qwen3.5"]


@pytest.mark.engine
def test_a_handful_has_the_verdicts_that_are_written_down(tmp_path):
    pytest.importorskip("vllm")
    made = tmp_path / "results.json"
    command = [sys.executable, HERE / "sweep.py", "--results", made, "--only", *SERVED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    served = json.loads(made.read_text())
    assert not unexpected(served)
    assert verdicts(served) == {name: verdicts(RESULTS)[name] for name in SERVED}
    assert all(entry.get("accepted", 99) > 20 for entry in served.values())


def test_every_family_is_identical_or_refused():
    assert RESULTS.keys() == FAMILIES.keys()
    assert not unexpected(RESULTS)
    assert sum(verdict == "identical" for verdict in verdicts(RESULTS).values()) >= 70


def verdicts(results):
    return {name: entry["verdict"] for name, entry in results.items()}


def unexpected(results):
    """Families with other tokens or late errors, or whose tokens a wrong mask would not change."""
    return {
        name: entry
        for name, entry in results.items()
        if entry["verdict"] not in ("identical", "refused", "cannot start", "no reference")
        or entry.get("drafter", entry)["verdict"] in ("different", "fails")
        or "control" in entry
    }
