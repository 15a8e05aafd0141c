"""Values that several benchmarks take on their command lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import typer


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers above 0 with commas between them."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise SystemExit(f"{option} is {text!r}, but must be whole numbers such as 30,60,120.")
    return [int(part) for part in parts]


def known(option: str, given: Iterable[str] | None, choices: Collection[str]) -> list[str]:
    """Return the names that were given, each once, all of which have to be choices; None: all."""
    names = list(dict.fromkeys(given or choices))
    for name in names:
        if name not in choices:
            raise typer.BadParameter(
                f"There is no {option} {name!r}; there are {', '.join(choices)}."
            )
    return names
