"""Pages for people: links lead somewhere, figures stand where they are taken from, and pages that
are written by tools are up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pages as tool
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(ROOT.glob("examples/**/*.md"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *EXAMPLES]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if not link.startswith("http")]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_figures_stand_on_the_page_they_are_taken_from():
    """Those of docs/guide.md with a fraction: 12 nodes and batch 4 are no results."""
    page = ROOT / "docs/guide.md"
    rows = [line for line in page.read_text().splitlines() if "benchmarks/results" in line]
    assert len(rows) >= 5
    for row in rows:
        (link,) = LINK.findall(row)
        source = (page.parent / link).read_text()
        figures = re.findall(r"\d+\.\d+", row)
        assert figures and all(figure in source for figure in figures), row


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
