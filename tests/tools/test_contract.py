"""`make contract`: the hooks against a release's wheel."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(tmp_path, monkeypatch):
    module = load_script(ROOT / "tools/contract.py")
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    return module


def test_the_installed_vllm_has_all_hooks(tool, capsys):
    pytest.importorskip("vllm")
    assert tool.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "hooks hold in the installed vLLM" in said[0]
