"""Cells of a table: prompts of one kind at one temperature. A row is an engine.

Every engine answers the same cells and is held against plain vLLM, which comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_process import Answer, EngineFailed, Request, run

PLAIN = "vLLM"
TEMPERATURES = (0.0, 1.0)


def cells(kinds: Sequence[str]) -> list[tuple[str, float]]:
    """(kind, temperature) of every cell."""
    return [(kind, temperature) for kind in kinds for temperature in TEMPERATURES]


def cell_name(kind: str, temperature: float) -> str:
    return f"{kind}, T = {temperature:g}"


def cell_names(kinds: Sequence[str]) -> list[str]:
    return [cell_name(*cell) for cell in cells(kinds)]


def summary(
    kinds: Sequence[str], answers: list[Answer], plain: dict[str, Any] | None
) -> dict[str, Any]:
    """One engine's results by cell; `plain` are plain vLLM's, None for its own."""
    return {
        name: answer.summary(plain and plain[name])
        for name, answer in zip(cell_names(kinds), answers, strict=True)
    }


def answers_of(request: Request, name: str) -> list[Answer] | None:
    """What the engine called `name` answers, a cell each; None if it failed, which is said."""
    print(f"{name} …", flush=True)
    try:
        return list(run(request))
    except EngineFailed as error:
        print(f"{name}: {error}")
        return None
