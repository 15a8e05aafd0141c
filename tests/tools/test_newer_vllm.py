"""An environment with another release's Python: what lies over what, and what it calls itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import load_script

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
