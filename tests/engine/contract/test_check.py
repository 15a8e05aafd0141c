"""The contract finds what is missing, moved, renamed or reordered in sources that nobody runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from textwrap import dedent

import pytest

from vllm_specblock.engine.contract.check import broken, hooks
from vllm_specblock.engine.contract.hook import Attributes, Has, IsClassMethod, Says, SaysNot, Takes
from vllm_specblock.engine.contract.imports import Imports, our_imports, replaced_kernels
from vllm_specblock.engine.contract.sources import Sources, installed

FILES = {
    "__init__.py": 'LAZY = {"LLM": ".entrypoints:LLM"}\n',
    "base.py": """
        class Base:
            kept: int = 0

            def inherited(self, one, *, two=1):
                self.seen = one
        """,
    "front.py": "from vllm.base import *\nfrom .base import Base as Other\n",
    "deep/__init__.py": "from ..front import Other\n",
    "deep/part.py": """
        from typing import TYPE_CHECKING, overload
        from vllm.front import Other

        if TYPE_CHECKING:
            late: int
        try:
            import fast
        except ImportError:
            fast = None

        class Here(Other):
            @classmethod
            def made(cls, size): ...

            @overload
            def run(self, a): ...
            def run(self, a, b, c=None, **rest):
                first = self.begin(
                    a, b
                )
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


PART = "deep/part.py"


@pytest.mark.parametrize(
    ("hook", "trouble"),
    [
        (Takes("Here.run", "self a b c rest", file=PART), None),
        (Takes("Here.run", "self a", "first", file=PART), None),
        (Takes("Here.run", "c b", "among", file=PART), None),
        (Takes("Here.inherited", "self one two", file=PART), None),
        (Takes("Base.inherited", "self one two", file="front.py"), None),
        (Takes("Other.inherited", "self one two", file="deep/__init__.py"), None),
        (Takes("Here.run", "self b a", "first", file=PART), "begins with (self, a, b, c, rest)"),
        (Takes("Here.run", "self a b c", file=PART), "takes (self, a, b, c, rest), not (self, a"),
        (Takes("Here.run", "self d", "among", file=PART), "lacks d"),
        (Takes("Here.gone", "self", file=PART), "has no 'Here.gone'"),
        (Takes("late", "self", file=PART), "it is no function"),
        (Takes("Here", "self", file="deep/gone.py"), "there is no vllm/deep/gone.py"),
        (Has("Here", "made run kept inherited", file=PART), None),
        (Has("", "late fast Other", file=PART), None),
        (Has("Here", "made lost gone", file=PART), "has no lost, gone"),
        (Says("Here.run", ("self.begin(a, b)", "self.end(first)"), file=PART), None),
        (Says("Here.run", ("self.end(", "self.begin("), file=PART), "'self.begin('"),
        (Says("Here.run", ("other", "self.end("), one=True, file=PART), None),
        (Says("Here.run", ("other", "third"), one=True, file=PART), "says none of"),
        (SaysNot("Here.run", "self.stop(", file=PART), None),
        (SaysNot("Here.run", "self . begin(", file=PART), "says 'self . begin(' now"),
        (Attributes("Base", "seen", file="base.py"), None),
        (Attributes("Base", "seen lost", file="base.py"), "has no lost"),
        (IsClassMethod("Here.made", file=PART), None),
        (IsClassMethod("Here.run", file=PART), "is no class method"),
        (Imports("Here", "vllm.deep.part"), None),
        (Imports("part", "vllm.deep"), None),
        (Imports("LLM", "vllm"), None),
        (Imports("gone", "vllm"), "has no 'gone'"),
        (Imports("Here", "vllm.gone"), "there is no module vllm.gone"),
    ],
)
def test_what_a_hook_finds(sources, hook, trouble):
    found = hook.trouble(sources)
    assert found is None if trouble is None else trouble in found, found


def test_it_is_about_all_that_we_use():
    assert len(hooks()) > 250
    modules = {hook.user.split("/")[0] for hook in hooks()}
    assert modules >= {"config", "runner", "adaptive", "attention", "cpu", "offline"}
    imports = {(hook.module, hook.name) for hook in our_imports()}
    assert ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator") in imports
    kernels = {hook.name: hook for hook in replaced_kernels()}
    update = kernels["_post_update_kernel"]
    assert len(kernels) > 15 and (update.least, update.most) == (13, 16)


def test_a_changed_release_is_told_apart(tmp_path):
    """Of a copy of the installed sources, with one argument renamed and one file gone."""
    used = {hook.file for hook in hooks() if hook.file}
    root = installed()
    for file in root.rglob("*.py"):
        name = file.relative_to(root).as_posix()
        if name in used or name.endswith("__init__.py") or name.split("/")[0] in ("v1", "config"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / name)
    before = {str(each) for each in broken(tmp_path)}
    runner = tmp_path / "v1/worker/gpu/model_states/default.py"
    text = runner.read_text()
    assert text.count("req_index: int, new_req_data") == 1
    runner.write_text(text.replace("req_index: int, new_req_data", "slot: int, new_req_data"))
    (tmp_path / "v1/worker/gpu/warmup.py").unlink()
    after = {str(each) for each in broken(tmp_path)} - before
    assert any("DefaultModelState.add_request takes (self, slot" in each for each in after)
    assert any("there is no vllm/v1/worker/gpu/warmup.py" in each for each in after)
    assert len(after) == 3, after  # the import of that file is the third


def test_nothing_is_imported_for_it():
    code = (
        "import sys; from vllm_specblock.engine.contract.check import broken; "
        "from vllm_specblock.engine.contract.sources import installed; "
        "found = list(broken(installed())); "
        "print(found, [name for name in ('vllm', 'torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
