"""What was looked at, and what is to be thought of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["right", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        found: how it is.
        verdict: wrong: an engine would fail, or run without drafts; note: it is worth knowing.
        advice: what to do, one line; empty where nothing is to be done.
    """

    name: str
    found: str
    verdict: Verdict = "right"
    advice: str = ""


def wrong(name: str, found: str, advice: str) -> Finding:
    return Finding(name, found, "wrong", advice)


def as_line(error: BaseException) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
