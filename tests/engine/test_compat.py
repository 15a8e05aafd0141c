"""What we rely on in vLLM: the table of hooks. doctor/test_doctor.py holds the installed one."""

from __future__ import annotations

import shutil

from vllm_specblock.engine import compat
from vllm_specblock.engine.compat import broken, hooks, installed, parts_of


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
