"""Speed-up and τ by set as grouped bars, a figure each per temperature, with spread marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specblock.bench.summary import MEAN, Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 0.84
"""Of a group of bars; the next group begins at 1."""


def draw(figures: Sequence[Figures], base: str, folder: Path) -> list[Path]:
    """Write speedup_T*.png and tau_T*.png; nothing where matplotlib is not installed.

    Args:
        base: the plain vLLM whose speed-up is 1.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    paths = []
    for temperature in dict.fromkeys(each.temperature for each in figures):
        those = [each for each in figures if each.temperature == temperature]
        for what, label in (("speedup", f"speed-up over {base}"), ("tau", "τ, tokens per step")):
            figure = Figure(figsize=(2 + 1.6 * len({each.set for each in those}), 4))
            axes = figure.subplots()
            bars(axes, those, what)
            axes.set_ylabel(label)
            axes.set_title(f"T = {temperature:g}")
            paths.append(folder / f"{what}_T{temperature:g}.png")
            figure.savefig(paths[-1], dpi=150, bbox_inches="tight")
    return paths


def bars(axes: Axes, figures: Sequence[Figures], what: str) -> None:
    """Draw a group of bars per set, a colour per method."""
    sets = [*dict.fromkeys(each.set for each in figures if each.set != MEAN), MEAN]
    methods = [*dict.fromkeys(each.method for each in figures)]
    width = WIDTH / len(methods)
    for number, method in enumerate(methods):
        found = [f for f in figures if f.method == method and getattr(f, what) is not None]
        where = [sets.index(f.set) - WIDTH / 2 + (number + 0.5) * width for f in found]
        axes.bar(where, [getattr(f, what) for f in found], width, label=method)
        for x, each in zip(where, found):
            spread = getattr(each, f"{what}_spread")
            if spread is not None:
                low, high = spread
                axes.vlines(x, low, high, colors="black", linewidth=1)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(sets)), sets)
    # Below, where no bar is.
    axes.legend(
        fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False
    )
