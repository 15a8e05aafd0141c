"""Pages for people: links lead somewhere, and figures stand on the page they are taken from."""

from __future__ import annotations

import re
from pathlib import Path

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
