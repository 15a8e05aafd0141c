"""Pages that are written by tools: up to date, and read from where they say."""

from __future__ import annotations

import json

import pages as tool
import pytest


@pytest.mark.parametrize("name", tool.PAGES)
def test_a_page_is_up_to_date(name):
    page = (tool.ROOT / name).read_text(encoding="utf-8")
    assert tool.render(name, page) == page, f"{name} is out of date: run python {tool.__file__}"


def test_every_case_combination_and_family_is_on_it():
    page = (tool.ROOT / "docs/support.md").read_text(encoding="utf-8")
    families = json.loads((tool.ROOT / tool.FAMILIES).read_text())
    pytest.importorskip("vllm")
    from support.matrix import CASES

    assert list(tool.dictionary_of(tool.CASES, "CASES")) == list(CASES)
    assert all(name in page for name in CASES)
    assert all(name in page for name in families)
    assert all(f"| {name} | " in page for name in tool.dictionary_of(tool.QUANTISED, "FORMS"))
