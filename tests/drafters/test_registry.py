"""Drafters are found by name: those of the package, and those of other packages' entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.committed import zero_rows

from vllm_specblock.candidates import select_nodes
from vllm_specblock.committed import CommittedTokens
from vllm_specblock.config import OptionError, parse_drafter, split_keys
from vllm_specblock.drafters import ENTRY_POINTS
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.registry import (
    DRAFTERS,
    DrafterOptions,
    drafter_kind,
    register_drafter,
)
from vllm_specblock.tree import DraftTree

OURS = ["specblock", "eagle3", "dflash", "jetspec", "ngram"]


@pytest.fixture
def toy(monkeypatch):
    """The options of a drafter of kind "toy", whose module loads when it is asked for."""

    @register_drafter("toy", "toy_drafter:Toy")
    class ToyConfig(DrafterOptions):
        width: int = 2

        @classmethod
        def defaults_for(cls, num_nodes):
            return {"width": num_nodes}

    module = ModuleType("toy_drafter")
    module.Toy = type("Toy", (Drafter,), {"kind": "toy"})
    monkeypatch.setitem(sys.modules, "toy_drafter", module)
    yield ToyConfig
    del DRAFTERS["toy"]


def test_a_registered_drafter_is_found_by_its_name(toy):
    first, second, _ = split_keys({"method": "specblock", "kind": "toy", "width": 3})
    assert first == {"kind": "toy", "width": 3} and second is None
    assert parse_drafter({"width": 3}, "toy") == toy(width=3)
    assert parse_drafter({}, "toy", num_nodes=9).width == 9
    found = drafter_kind("toy")
    assert found.options is toy and found.load_class() is sys.modules["toy_drafter"].Toy
    with pytest.raises(OptionError, match=r"'depth' is not known; accepted of a drafter of kind"):
        parse_drafter({"depth": 3}, "toy")


def test_an_unknown_name_is_answered_with_the_known_ones(toy):
    known = ", ".join(DRAFTERS)
    with pytest.raises(ValueError) as error:
        drafter_kind("hydra")
    assert str(error.value) == f"There is no drafter of kind 'hydra': choose one of {known}."
    with pytest.raises(OptionError, match=f"'kind' is 'hydra', but must be one of {known}"):
        split_keys({"kind": "hydra"})


OPTIONS = """
from vllm_specblock.drafters.registry import DrafterOptions, register_drafter

@register_drafter("other", "other_drafter.drafter:Other")
class OtherConfig(DrafterOptions):
    pass
"""


def test_an_installed_package_brings_its_drafters(tmp_path):
    """One that fails to import is reported, and changes nothing else."""
    info = tmp_path / "other_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-drafter\nVersion: 1.0\n")
    points = "broken = not_there.options\nother = other_drafter\n"
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{points}")
    (tmp_path / "other_drafter.py").write_text(OPTIONS)
    done = subprocess.run(
        [sys.executable, "-c", "from vllm_specblock.config import DRAFTERS; print(*DRAFTERS)"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {*OURS, "other"} <= set(done.stdout.split())
    assert "The drafters of entry point 'broken' are left out." in done.stderr


# ---- The drafter that docs/extending.md shows is complete ----
PAGE = Path(__file__).resolve().parents[2] / "docs/extending.md"


def test_the_drafter_of_the_page_drafts():
    options, drafter = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    tools = torch, Drafter, DrafterOptions, register_drafter, CommittedTokens, DraftTree
    names = {each.__name__: each for each in (*tools, select_nodes)} | {"__name__": __name__}
    try:
        exec(options + drafter, names)
        given = parse_drafter({"tokens": [7, 3, 9]}, "favourites")
    finally:
        DRAFTERS.pop("favourites", None)
    made = names["Favourites"](given, 3, 64)
    made.advance(zero_rows(8, 4))
    tree = made.draft()
    assert tree.token.tolist() == [[7, 3, 9]] * 2 and (tree.parent == 0).all()
