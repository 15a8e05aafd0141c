"""The findings of `specblock doctor`, a line each and one of advice below it."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_specblock.engine.doctor.installation import Finding, Verdict

MARKS: dict[Verdict, tuple[str, str]] = {
    "right": ("✓", "green"),
    "note": ("!", "yellow"),
    "wrong": ("✗", "red"),
}


def print_findings(findings: Iterable[Finding]) -> int:
    """Print them; returns how many are wrong."""
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for column in ("", "", ""):
        table.add_column(column, overflow="fold")
    count = 0
    for finding in findings:
        mark, colour = MARKS[finding.verdict]
        count += finding.verdict == "wrong"
        said = Text(finding.found)
        if finding.advice:
            said.append(f"\n{finding.advice}", style=colour)
        table.add_row(Text(mark, style=colour), Text(finding.name), said)
    # In a pipe rich takes 80 columns, and a sentence is to be found by its words.
    console.width = max(console.width, 1000 if not console.is_terminal else 0)
    console.print(table)
    console.print("Nothing is wrong." if not count else f"{count} wrong.", markup=False)
    return count
