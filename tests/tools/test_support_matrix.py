"""Pages that are written by tools: up to date, and read from where they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool():
    return load_script(ROOT / "tools/support_matrix.py")


def test_the_page_is_up_to_date(tool):
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.render(page) == page, (
        "docs/support.md is out of date: run python tools/support_matrix.py"
    )


def test_the_tables_of_options_are_up_to_date():
    import options_page

    page = options_page.PAGE.read_text(encoding="utf-8")
    assert options_page.render(page) == page, (
        "docs/options.md is out of date: run python tools/options_page.py"
    )


def test_every_case_combination_and_family_is_on_it(tool):
    page = tool.PAGE.read_text(encoding="utf-8")
    families = json.loads((ROOT / tool.FAMILIES).read_text())
    pytest.importorskip("vllm")
    from support.matrix import CASES

    assert list(tool.dictionary_of(tool.CASES, "CASES")) == list(CASES)
    assert all(name in page for name in CASES)
    assert all(name in page for name in families)
    assert all(f"| {name} | " in page for name in tool.dictionary_of(tool.QUANTISED, "FORMS"))
