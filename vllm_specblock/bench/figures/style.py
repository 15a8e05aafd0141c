"""Colours and words that the figures and the terminal share, and matplotlib where it is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specblock.config import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

FORWARDS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#b07aa1",
    "#17a2b8",
    "#c9a227",
    "#9c755f",
    "#e377c2",
)
"""Of drafter forward 1, 2, …, again from the first on where there are more."""
ACCEPTED = "#c1121f"
"""Edges and borders of the accepted path."""
BONUS, PREFILL = "#f4a6a6", "#e9ecef"
"""Shades of bonus tokens, and of the first token, which the prompt's own forward gives."""
TAKEN = "#a8dda8"
"""Shade of text that was drafted and accepted."""


def forward_colour(forward: int) -> str:
    """Of drafter forward 1, 2, …."""
    return FORWARDS[(forward - 1) % len(FORWARDS)]


def shown(tokenizer: PreTrainedTokenizerBase, token: int, most: int = 14) -> str:
    """One token for a label of at most so many letters: blanks and line ends are to be seen."""
    text = tokenizer.decode([token])
    for hidden, seen in ((" ", "·"), ("\n", "⏎"), ("\t", "⇥"), ("\r", "␍")):
        text = text.replace(hidden, seen)
    return (text if len(text) <= most else text[: most - 1] + "…") or "∅"


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise OptionError(
            "Pictures are drawn with matplotlib, which is not installed: "
            "pip install 'vllm-specblock[bench]'."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Figure, path: Path) -> None:
    """Write a figure and close it; the suffix of `path` says in which format.

    Text in an SVG stays text: whatever it is written in, a reader's fonts have more letters than
    those that matplotlib measures with.
    """
    import warnings

    plot = pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    with plot.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, dpi=150, bbox_inches="tight")
    plot.close(figure)


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
