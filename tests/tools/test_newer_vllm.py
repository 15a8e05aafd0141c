"""An environment with another release's Python: what lies over what, and what it calls itself."""

from __future__ import annotations

from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from support.scripts import load_script

from vllm_specblock.versions import is_supported

ROOT = Path(__file__).resolve().parents[2]
BUILD = "0.32.0+cpu"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    module = load_script(ROOT / "tools/newer_vllm.py")
    monkeypatch.setattr(module, "MADE", tmp_path / "made")
    return module


def test_sources_of_the_one_and_compiled_parts_of_the_other(tool, tmp_path):
    base, sources, package = (tmp_path / name for name in ("base", "sources", "package"))
    files = {
        base / "_C.abi3.so": "parts",
        base / "deep/down/_D.abi3.so": "more parts",
        base / "old.py": "old",
        base / "both.py": "old",
        sources / "both.py": "new",
        sources / "data.json": "{}",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tool.lay_over(sources, base, package)
    made = {p.relative_to(package).as_posix(): p for p in package.rglob("*") if p.is_file()}
    assert {name: path.read_text() for name, path in made.items()} == {
        "both.py": "new", "data.json": "{}", "_C.abi3.so": "parts",
        "deep/down/_D.abi3.so": "more parts",
    }  # fmt: skip
    made["both.py"].write_text("changed")
    assert (sources / "both.py").read_text() == "new", "no link to what others read"


def test_metadata_that_says_what_it_is(tool, tmp_path):
    tool.name_it(tmp_path, "0.33.0", BUILD)
    (info,) = tmp_path.iterdir()
    found = PathDistribution(info)
    assert found.metadata["Name"] == "vllm"
    assert found.version == "0.33.0+cpu.parts.of.0.32.0" and is_supported(found.version)
    assert found.metadata["Summary"].startswith("Python of vLLM 0.33.0 over compiled parts of 0.32")
    assert "build of neither" in found.read_text("METADATA")
    assert [each.name for each in found.entry_points] == ["vllm"]


@pytest.mark.parametrize("build", [None, "0.32.0"])
def test_without_a_build_for_cpus_it_is_one_sentence(tool, build, monkeypatch, capsys):
    monkeypatch.setattr(tool, "installed_version", lambda name: build)
    monkeypatch.setattr(tool, "folder_of", lambda release: pytest.fail("too early"))
    assert tool.main(["0.33.0"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"here is {build}" in said and "make setup" in said


def test_the_whole_of_it(tool, tmp_path, monkeypatch, capsys):
    """With a made-up release that has nothing but a version."""
    pytest.importorskip("vllm")
    kept = tmp_path / "kept"
    (kept / "9.9.0/vllm").mkdir(parents=True)
    (kept / "9.9.0/vllm/__init__.py").write_text("answer = 42\n")
    monkeypatch.setattr(tool, "folder_of", lambda release: kept / release / "vllm")
    monkeypatch.setattr(tool, "installed_version", lambda name: BUILD)
    assert tool.main(["9.9.0"]) == 0
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
