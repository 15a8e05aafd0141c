"""Committed text shaded by where each token comes from (SpecBlock, figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from vllm_specblock.bench.figures.style import BONUS, PREFILL, TAKEN, pyplot, save
from vllm_specblock.train.eval.steps import Step

COLUMNS = 64
"""Letters of a line."""
_LETTER = 0.084
"""Inches that one of them takes."""


class Origin(StrEnum):
    """Where a committed token comes from."""

    PREFILL = "prefill"  # the target's first token, before anything was drafted
    ACCEPTED = "accepted"
    BONUS = "bonus"


COLOURS = {Origin.PREFILL: PREFILL, Origin.ACCEPTED: TAKEN, Origin.BONUS: BONUS}


class Committed(NamedTuple):
    """One token of an answer."""

    token: int
    origin: Origin


def committed_tokens(steps: Sequence[Step]) -> list[Committed]:
    """What the first steps of a text commit, in order; the first root comes of the prompt."""
    found = [Committed(step.token[0], Origin.PREFILL) for step in steps[:1]]
    for step in steps:
        found += [Committed(step.token[node], Origin.ACCEPTED) for node in step.accepted[1:]]
        if step.bonus is not None:
            found.append(Committed(step.bonus, Origin.BONUS))
    return found


class Placed(NamedTuple):
    """A piece of a token on the page: column and line of its first letter."""

    column: int
    line: int
    text: str
    origin: Origin


def place(words: Sequence[tuple[str, Origin]], columns: int = COLUMNS) -> list[Placed]:
    """Set tokens in lines; one that holds a line end is shaded up to it and from there on.

    Args:
        words: text and origin of each token.
    """
    placed, column, line = [], 0, 0
    for word, origin in words:
        for index, part in enumerate(word.split("\n")):
            if index or (column and column + len(part) > columns):
                column, line = 0, line + 1
            # A line end is a token, or part of one: it must show what it was.
            part = part + "⏎" * (index < word.count("\n"))
            if part:
                placed.append(Placed(column, line, part, origin))
            column += len(part)
    return placed


def plot_shaded_text(
    answers: dict[str, list[tuple[str, Origin]]], path: Path, more: Sequence[str] = ()
) -> None:
    """Answers side by side.

    Args:
        answers: per drafter, text and origin of each token.
        more: drafters whose answers go on: an ellipsis follows.
    """
    from matplotlib.patches import Patch, Rectangle

    pages = {name: place(words) for name, words in answers.items()}
    pieces = [piece for page in pages.values() for piece in page]
    lines = 2 + max(piece.line for piece in pieces)
    wide = 4 + max(piece.column + len(piece.text) for piece in pieces)  # with the ellipsis
    figure, every = pyplot().subplots(
        1,
        len(pages),
        squeeze=False,
        figsize=(len(pages) * _LETTER * wide, 0.22 * lines + 0.7),
        gridspec_kw={"left": 0, "right": 1, "wspace": 0},
    )
    for axes, (name, page) in zip(every[0], pages.items()):
        for piece in page:
            x, y = piece.column, -piece.line
            colour = COLOURS[piece.origin]
            axes.add_patch(Rectangle((x, y - 0.5), len(piece.text), 0.9, color=colour, lw=0))
            how = {"family": "monospace", "fontsize": 9.5, "va": "center", "parse_math": False}
            # Letter by letter: a font that is a little wider would leave its shade.
            for offset, letter in enumerate(piece.text):
                axes.text(x + offset + 0.5, y - 0.05, letter, ha="center", **how)
        if name in more:
            axes.text(page[-1].column + len(page[-1].text) + 0.5, -page[-1].line, "…")
        axes.set_xlim(-1, wide - 1)
        axes.set_ylim(-lines + 0.4, 0.8)
        axes.set_title(name, fontsize=10)
        axes.axis("off")
    keys = [Patch(facecolor=COLOURS[origin], label=origin) for origin in Origin]
    figure.legend(handles=keys, loc="lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)
