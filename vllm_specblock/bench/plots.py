"""Speed-up and τ by set as grouped bars, a figure each per temperature, with spread marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specblock.bench.summary import MEAN, Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 0.84
"""Of a group of bars, where the next one begins at 1."""


def draw(figures: Sequence[Figures], base: str, folder: Path) -> list[Path]:
    """Write speedup_T*.png and tau_T*.png; none where matplotlib is not installed.

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
            bars(figure.subplots(), those, what)
            (axes,) = figure.axes
            axes.set_ylabel(label)
            axes.set_title(f"T = {temperature:g}")
            path = folder / f"{what}_T{temperature:g}.png"
            figure.savefig(path, dpi=150, bbox_inches="tight")
            paths.append(path)
    return paths


def bars(axes: Axes, figures: Sequence[Figures], what: str) -> None:
    """A group of bars per set, a colour per method, into `axes`."""
    sets = [*dict.fromkeys(each.set for each in figures if each.set != MEAN), MEAN]
    methods = [*dict.fromkeys(each.method for each in figures)]
    by_place = {(each.method, each.set): each for each in figures}
    width = WIDTH / len(methods)
    for number, method in enumerate(methods):
        found = [
            (place, by_place[method, name])
            for place, name in enumerate(sets)
            if (method, name) in by_place and getattr(by_place[method, name], what) is not None
        ]
        where = [place - WIDTH / 2 + (number + 0.5) * width for place, _ in found]
        heights = [getattr(each, what) for _, each in found]
        axes.bar(where, heights, width, label=method)
        for x, (_, each) in zip(where, found):
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
