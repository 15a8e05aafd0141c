"""What we rely on in vLLM: the table of hooks. doctor/test_doctor.py holds the installed one."""

from __future__ import annotations

import shutil
from textwrap import dedent

import pytest

from vllm_specblock.engine import compat
from vllm_specblock.engine.compat import Hook, Sources, broken, installed

FILES = {
    "__init__.py": 'LAZY = {"LLM": ".entrypoints:LLM"}\n',
    "base.py": "class Base: ...\n",
    "deep/__init__.py": "from ..base import *\n",
    "deep/named.py": "name = 1\n",
    "deep/part.py": """
        from typing import overload

        try:
            import fast
        except ImportError:
            def late(size): ...

        class Here:
            kept: int = 0

            @classmethod
            def made(cls, size): ...

            @overload
            def run(self, a): ...
            def run(self, a, b, *, c=None, **rest):
                first = self.begin(
                    a, b
                )
                self.seen = first
                return self.end(first)
        """,
}


@pytest.fixture
def sources(tmp_path) -> Sources:
    for name, text in FILES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return Sources(tmp_path / "vllm")


@pytest.mark.parametrize(
    ("need", "trouble"),
    [
        ("Here.run(self, a, b, c, rest)", None),
        ("Here.run(self, a, ...)", None),
        ("Here.run: c b", None),
        ("late: size", None),
        ("late(size)", None),
        ("Here.run(self, b, a, ...)", "takes (self, a, b, c, rest), not (self, b, a, ...)"),
        ("Here.run(self, a, b, c)", "takes (self, a, b, c, rest), not (self, a"),
        ("Here.gone(self)", "has no 'Here.gone'"),
        ("Here: made run kept seen", None),
        ("Here: made lost gone", "has no lost, gone"),
        ("Here ~ @classmethod def made(", None),
        ("Here.run ~ self.begin(a, b) ... self.end(first)", None),
        ("Here.run ~ self.end( ... self.begin(", "does not say 'self.end( ... self.begin('"),
        ("~ other || self.end(", None),
        ("Here.run !~ self.stop(", None),
        ("Here.run !~ self . begin(", "says 'self . begin(' now"),
        ("from vllm.deep.part import Here", None),
        ("from vllm.deep import named", None),
        ("from vllm.deep import Base", "has no 'Base'"),
        ("from vllm import LLM", None),
        ("from vllm.gone import Here", "there is no module vllm.gone"),
    ],
)
def test_a_need_is_met_or_says_why_not(sources, need, trouble):
    found = Hook("deep/part.py", need, "all").trouble(sources)
    assert found is None if trouble is None else trouble in found, found


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
