"""`make contract`: the hooks against a release's wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(tmp_path, monkeypatch):
    module = load_script(ROOT / "tools/contract.py")
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    return module


def wheel(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("vllm/__init__.py", "")
        packed.writestr("vllm/_C.abi3.so", "machine code")
        packed.writestr("vllm/csrc/attention.cuh", "source of machine code")
        packed.writestr("vllm/model_executor/config.json", "{}")
        packed.writestr("vllm-9.9.dist-info/METADATA", "Name: vllm\nRequires-Dist: numpy>=2\n")
    return path


def test_the_installed_vllm_has_all_hooks(tool, capsys):
    pytest.importorskip("vllm")
    assert tool.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "hooks hold in the installed vLLM" in said[0]


def test_a_wheel_is_downloaded_once_and_only_its_sources_are_kept(tool, monkeypatch, capsys):
    calls = []

    def pip(command):
        calls.append(command)
        wheel(Path(command[command.index("--dest") + 1]) / "vllm-9.9-none.whl")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(tool.subprocess, "run", pip)
    assert tool.main(["9.9"]) == 1, "an empty package has no hook"
    assert tool.main(["9.9"]) == 1
    (command,) = calls
    assert command[-1] == "vllm==9.9" and "--no-deps" in command
    files = [path for path in tool.KEPT.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"__init__.py", "config.json", "METADATA"}
    said = capsys.readouterr().out
    assert "there is no vllm/engine/arg_utils.py" in said and "0 of " in said
