"""Acceptance rates by position as plots (SpecBlock, figures 5a and 5b)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specblock.bench.figures.measure import DrafterFigures
from vllm_specblock.bench.figures.style import forward_colour, pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAFTERS = ("#222222", "#c1121f", "#2a6f4e", "#7b4fb0")
"""Lines of drafter 1, 2, …: none of the colours of drafter forwards."""


def plot_alpha(drafters: dict[str, DrafterFigures], path: Path) -> None:
    """Figure 5a: α_k along the main path of the served tree, to the depth of each drafter.

    Thick lines are means over the sets, thin ones single sets. Below them, for each drafter: which
    of its forwards proposed the tokens at that position, all sets together.
    """
    count = len(drafters)
    figure, (axes, *bars) = pyplot().subplots(
        1 + count, sharex=True, figsize=(6.4, 4 + 0.9 * count), height_ratios=[4] + [0.9] * count
    )
    for index, (name, found) in enumerate(drafters.items()):
        colour = DRAFTERS[index % len(DRAFTERS)]
        for figures in found.sets.values():
            _line(axes, figures.main_path.alpha, color=colour, linewidth=0.6, alpha=0.4)
        _line(axes, found.alpha, color=colour, linewidth=2.2, marker="o", label=name)
        _shares(bars[index], found.forward_shares)
        bars[index].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    axes.set_ylabel("acceptance rate α$_k$")
    axes.set_xlim(0.4, max(len(found.alpha) for found in drafters.values()) + 0.6)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title("first choice accepted, given that all before it were", fontsize=10)
    bars[-1].set_xlabel("k, position on the main path; below: the forward that proposed it")
    save(figure, path)


def plot_block_alpha(drafters: dict[str, DrafterFigures], path: Path) -> None:
    """Figure 5b: α_{m,j}, position j of block m given that the blocks before were entirely right.

    Args:
        drafters: those that draft blocks.
    """
    figure, every = pyplot().subplots(
        1, len(drafters), sharey=True, squeeze=False, figsize=(4.2 * len(drafters), 3.6)
    )
    for axes, (name, found) in zip(every[0], drafters.items()):
        assert found.alpha_mj is not None
        for m, block in enumerate(found.alpha_mj, start=1):
            colour = forward_colour(m)
            for figures in found.sets.values():
                assert figures.chain is not None
                _line(axes, figures.chain.alpha_mj[m - 1], color=colour, linewidth=0.6, alpha=0.4)
            _line(axes, block, color=colour, linewidth=2.2, marker="o", label=f"block {m}")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("j, position in the block")
        axes.set_xticks(range(1, len(found.alpha_mj[0]) + 1))
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    every[0][0].set_ylabel("acceptance rate α$_{m,j}$")
    save(figure, path)


def _line(axes: Axes, values: list[float | None], **how: Any) -> None:
    there = [(k, value) for k, value in enumerate(values, start=1) if value is not None]
    axes.plot([k for k, _ in there], [value for _, value in there], **how)


def _shares(axes: Axes, shares: list[dict[int, float]]) -> None:
    """A stack of drafter forwards at every position."""
    for k, of_forward in enumerate(shares, start=1):
        below = 0.0
        for forward, share in of_forward.items():
            axes.bar(k, share, bottom=below, width=0.8, color=forward_colour(forward))
            below += share
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xticks(range(1, len(shares) + 1))
