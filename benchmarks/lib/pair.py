"""The example pair, and text that its drafter has not seen."""

from __future__ import annotations

import sys
from functools import cache

from lib.results_store import ROOT

PAIR = ROOT / "examples/tiny_pair"
TARGET, DRAFTER, EAGLE3 = PAIR / "target", PAIR / "drafter", ROOT / "examples/two_heads/eagle3"
sys.path.insert(0, str(PAIR))

import corpus  # noqa: E402


@cache
def held_out() -> list[str]:
    return corpus.load().held_out


def beginnings(count: int, *size: int) -> list[str]:
    """Return beginnings of held-out files; size: characters of each."""
    return corpus.prompts(held_out(), count, *size)
