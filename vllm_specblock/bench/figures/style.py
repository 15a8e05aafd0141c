"""Colours and words that pictures and the terminal share; matplotlib where it is installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specblock.config import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

FORWARDS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1"),
    *("#17a2b8", "#c9a227", "#9c755f", "#e377c2"),
)
"""Of drafter forward 1, 2, …, repeated from the first on."""
ACCEPTED = "#c1121f"
"""Edges and borders of the accepted path."""
BONUS, PREFILL = "#f4a6a6", "#e9ecef"
"""Shades of bonus tokens, and of the first token, which the prompt's own forward gives."""
TAKEN = "#a8dda8"
"""Shade of text that was drafted and accepted."""


def forward_colour(forward: int) -> str:
    """Return the colour of drafter forward 1, 2, …."""
    return FORWARDS[(forward - 1) % len(FORWARDS)]


def shown(tokenizer: PreTrainedTokenizerBase, token: int, most: int = 14) -> str:
    """Return a token as a label of at most `most` letters, with visible blanks and line ends."""
    text = tokenizer.decode([token])
    for hidden, seen in ((" ", "·"), ("\n", "⏎"), ("\t", "⇥"), ("\r", "␍")):
        text = text.replace(hidden, seen)
    return (text if len(text) <= most else text[: most - 1] + "…") or "∅"


def pyplot() -> Any:
    """Import matplotlib.pyplot, drawing to files.

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
    """Write a figure in the format of the path's suffix and close it.

    Text in an SVG stays text: a reader's fonts have more letters than matplotlib's.
    """
    plot = pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    with plot.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, dpi=150, bbox_inches="tight")
    plot.close(figure)
