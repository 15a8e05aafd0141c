"""What we rely on in vLLM, the installed one and others: the table of hooks, the image."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import contract
import pytest

from vllm_specblock.engine import compat
from vllm_specblock.engine.compat import broken, hooks, installed, parts_of
from vllm_specblock.versions import SUPPORTED_VLLM, is_supported


def test_every_hook_fails_where_its_file_is_empty(tmp_path):
    """Apart from those that want something not to be there."""
    table = [hook for hook in hooks() if hook.file]
    for hook in table:
        (tmp_path / hook.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hook.file).touch()
    held = [hook.need for hook in table if hook.trouble(tmp_path, parts_of) is None]
    assert len(table) > 100 and all(need.startswith("!~ ") for need in held), held


def test_a_changed_release_is_reported_with_what_breaks(tmp_path):
    """One argument is renamed, one file is gone."""
    state, scheduler = "v1/worker/gpu/model_states/default.py", "config/scheduler.py"
    for file in (state, scheduler):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed() / file, tmp_path / file)
    before = set(broken(tmp_path))
    text = (tmp_path / state).read_text()
    assert text.count("req_index: int, new_req_data") == 1
    (tmp_path / state).write_text(text.replace("req_index: int, new_req", "slot: int, new_req"))
    (tmp_path / scheduler).unlink()
    after = sorted(set(broken(tmp_path)) - before)
    assert len(after) == 2, after
    assert after[0].startswith("the scheduler for trees: there is no vllm/config/scheduler.py")
    assert after[1].startswith("the tree mask: DefaultModelState.add_request takes (self, slot")


def test_an_engine_warns_once_of_hooks_that_do_not_hold(monkeypatch):
    said = []
    compat.warn_of_broken_hooks.cache_clear()
    monkeypatch.setattr(compat.logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(compat, "broken", lambda root: iter(["the tree mask: it is gone"]))
    compat.warn_of_broken_hooks()
    compat.warn_of_broken_hooks()
    (line,) = said
    assert line.endswith("which may break the tree mask: it is gone")


def test_the_installed_vllm_has_all_hooks(capsys):
    pytest.importorskip("vllm")
    assert contract.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "hooks hold in the installed vLLM" in said[0]


ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_image_is_of_the_release_that_tests_run_on():
    text = (ROOT / "examples/docker/Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (.+)$", text, re.M)
    image, _, tag = base.partition(":")
    assert image == "vllm/vllm-openai" and is_supported(tag.removeprefix("v"))
    assert re.fullmatch(r"v\d+\.\d+\.\d+", tag), "no moving tag"
    tested = re.search(r'^VLLM = "(.+)"$', (ROOT / "tools/setup_env.py").read_text(), re.M)[1]
    assert tag == f"v{tested}" and next(iter(SUPPORTED_VLLM)) == tested.rpartition(".")[0]
