"""`specblock doctor` says what an engine would, before there is one, and exits by it.

A pair that goes together: test_installed.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.engines import DRAFTER, EAGLE3, TARGET, configure
from support.scripts import specblock
from support.targets import edit_config
from vllm import envs
from vllm.config import ModelConfig

from vllm_specblock.engine import doctor as setup
from vllm_specblock.engine.doctor import Finding, examine


@pytest.fixture(autouse=True)
def fresh():
    envs.disable_envs_cache()  # an engine of an earlier test switches it on


def doctor(*arguments: str | Path) -> tuple[int, str]:
    done = specblock("doctor", *arguments)
    return done.exit_code, done.output


def by_name(target=None, drafter=None, **given) -> dict[str, Finding]:
    """given: of a `speculative_config` beside the drafter's folder."""
    if drafter is not None:
        given["model"] = str(drafter)
    found = examine(None if target is None else str(target), given or None)
    return {finding.name: finding for finding in found}


def edited(folder: Path, to: Path, **changes) -> Path:
    shutil.copytree(folder, to)
    edit_config(to, **changes)
    return to


@pytest.mark.parametrize("which", ["target", "drafter", "files"])
def test_a_pair_that_does_not_says_what_an_engine_would(which, tmp_path):
    target, drafter = TARGET, DRAFTER
    if which == "target":
        target = edited(TARGET, tmp_path / "target", vocab_size=2049)
    else:
        changes = {"block_size": 5} if which == "drafter" else {}
        drafter = edited(DRAFTER, tmp_path / "drafter", **changes)
    if which == "files":
        (drafter / "model.safetensors").unlink()
    with pytest.raises(ValueError) as refused:
        configure({"model": str(drafter)}, target)
    code, said = doctor("--target", target, "--model", drafter)
    assert code == 1 and str(refused.value) in said


def test_a_target_that_cannot_be_verified(monkeypatch, tmp_path):
    assert doctor("--target", tmp_path / "nowhere")[0] == 1
    monkeypatch.setattr(ModelConfig, "uses_alibi", True)
    for drafter in (None, DRAFTER):
        found = by_name(TARGET, drafter)["target, drafter"]
        assert found.verdict == "wrong" and "ALiBi positions" in found.advice


def test_offline(monkeypatch):
    """vLLM then looks for the files of the target, or of its default one, as soon as it can."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert by_name("no/such", DRAFTER)["target, drafter"].verdict == "wrong"


def test_two_drafters():
    found = by_name(TARGET, DRAFTER, second_drafter=EAGLE3, draft_policy="merge")
    assert found["drafter 1"].found.startswith(f"{DRAFTER}: specblock")
    assert found["drafter 2"].found.startswith(f"{EAGLE3['model']}: eagle3")
    given = json.dumps({"model": str(DRAFTER), "second_drafter": {"kind": "ngram"}})
    code, said = doctor("--target", TARGET, "--speculative-config", given)
    assert code == 0 and "the requests' own text: ngram" in said, said


def test_a_wrong_command():
    code, said = doctor("--model", DRAFTER, "--speculative-config", "{}")
    assert code == 2 and "both given" in said
    code, said = doctor("--model", DRAFTER)
    assert code == 1 and "Give --target" in said


def test_wrong_packages_are_named_and_nothing_is_imported_then(monkeypatch):
    monkeypatch.setattr(setup, "installed_version", {"vllm": "0.31.2"}.get)
    monkeypatch.setattr(setup, "engine", lambda *_: pytest.fail("it made a config"))
    found = by_name(TARGET, DRAFTER)
    assert found["vLLM"].verdict == "wrong" and "0.31.2 is installed" in found["vLLM"].advice
    for name in ("torch", "transformers", "triton"):
        assert found[name].verdict == "wrong" and f"Install {name}" in found[name].advice
    assert "runner" not in found and found["target, drafter"].verdict == "wrong"
    assert doctor()[0] == 1


def test_a_plugin_that_vllm_does_not_load(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    found = by_name()
    assert found["vllm-specblock"].verdict == "wrong"
    assert "VLLM_PLUGINS" in found["vllm-specblock"].advice
    monkeypatch.setenv("VLLM_PLUGINS", "another,specblock")
    assert setup.plugin().verdict == "right"
    monkeypatch.setattr(setup, "entry_points", lambda group: [])
    assert "entry point" in setup.plugin().found


GPU = {"is_available": True, "get_device_name": "Some GPU", "get_device_capability": (9, 0)}


@pytest.mark.parametrize(
    ("gpu", "compiler", "release", "numba", "verdict", "says"),
    [
        (True, "/usr/bin/gcc", "0.32.0", True, "right", "compiles them for sm_90"),
        (True, None, "0.32.0", True, "wrong", "C compiler"),
        (False, None, "0.32.0", True, "wrong", "no GPU answers"),
        (False, None, "0.32.0+cpu", True, "right", "compiles loops"),
        (False, None, "0.32.0+cpu", False, "note", "interpreter"),
    ],
)
def test_what_runs_the_kernels(monkeypatch, gpu, compiler, release, numba, verdict, says):
    monkeypatch.delenv("CC", raising=False)
    for name, value in (GPU | {"is_available": gpu}).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(setup.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(setup, "installed_version", lambda name: release)
    monkeypatch.setattr("vllm_specblock.triton_kernels.optional_numba.AVAILABLE", numba)
    found = setup.kernels()
    assert found.verdict == verdict and says in found.found
