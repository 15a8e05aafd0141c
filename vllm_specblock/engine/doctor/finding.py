"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["right", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; "wrong": an engine would fail, or run without drafts."""

    name: str  # what was examined
    found: str  # its state
    verdict: Verdict = "right"
    advice: str = ""  # what to do, one line


def wrong(name: str, found: str, advice: str) -> Finding:
    return Finding(name, found, "wrong", advice)


def as_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
