"""Other releases of vLLM: the hooks, an environment with another one's Python, the image."""

from __future__ import annotations

import re
from pathlib import Path

import contract
import pytest
from support.scripts import load_script

from vllm_specblock.versions import SUPPORTED_VLLM, is_supported


def test_the_installed_vllm_has_all_hooks(capsys):
    pytest.importorskip("vllm")
    assert contract.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "hooks hold in the installed vLLM" in said[0]


ROOT = Path(__file__).resolve().parents[2]
BUILD = "0.32.0+cpu"


def test_the_whole_of_it(tmp_path, monkeypatch, capsys):
    """With a made-up release that has nothing but a version."""
    pytest.importorskip("vllm")
    tool = load_script(ROOT / "tools/newer_vllm.py")
    monkeypatch.setattr(tool, "MADE", tmp_path / "made")
    monkeypatch.setattr(tool, "ALSO", ())
    kept = tmp_path / "kept"
    (kept / "9.9.0/vllm").mkdir(parents=True)
    (kept / "9.9.0/vllm/__init__.py").write_text("answer = 42\n")
    monkeypatch.setattr(tool, "folder_of", lambda release: kept / release / "vllm")
    monkeypatch.setattr(tool, "version", lambda name: BUILD)
    tool.main(["9.9.0"])
    python = Path(capsys.readouterr().out.strip())
    assert python.is_file() and python.is_relative_to(tmp_path)
    code = (
        "import importlib.metadata as m, vllm, vllm_specblock, torch; "
        "print(m.version('vllm'), vllm.answer, vllm_specblock.__file__, torch.__file__)"
    )
    said = tool.subprocess.check_output([python, "-c", code], text=True, cwd=tmp_path).split()
    assert said[:2] == ["9.9.0+cpu.parts.of.0.32.0", "42"]
    assert Path(said[2]).is_relative_to(ROOT) and not Path(said[3]).is_relative_to(tmp_path)
    script = python.with_name("specblock").read_text()
    assert script.startswith(f"#!{python}\n") and 'name="specblock"' in script


def test_the_gpu_image_is_of_the_release_that_tests_run_on():
    text = (ROOT / "examples/docker/Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (.+)$", text, re.M)
    image, _, tag = base.partition(":")
    assert image == "vllm/vllm-openai" and is_supported(tag.removeprefix("v"))
    assert re.fullmatch(r"v\d+\.\d+\.\d+", tag), "no moving tag"
    tested = re.search(r'^VLLM = "(.+)"$', (ROOT / "tools/setup_env.py").read_text(), re.M)[1]
    assert tag == f"v{tested}" and next(iter(SUPPORTED_VLLM)) == tested.rpartition(".")[0]
