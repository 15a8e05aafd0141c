"""Values that several benchmarks take on their command lines."""

from __future__ import annotations

from typing import Any

PLAIN = "vLLM"
"""The engine that all others are held against."""


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers above 0 with commas between them."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise SystemExit(
            f"{option} is {text!r}, but must be whole numbers with commas between them, such as "
            "30,60,120."
        )
    return [int(part) for part in parts]


def chosen(found: dict[str, Any], only: str | None) -> dict[str, Any]:
    """Plain vLLM, and those whose name has one of `only`'s parts (semicolons between them)."""
    if only is None:
        return found
    parts = [part.strip() for part in only.split(";") if part.strip()]
    for part in parts:
        if not any(part in name for name in found):
            raise SystemExit(
                f"--only {part!r} is in no engine's name; there are: " + "; ".join(found)
            )
    return {
        name: keys
        for name, keys in found.items()
        if name == PLAIN or any(part in name for part in parts)
    }
