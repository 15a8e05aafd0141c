"""Figures 5, 6 and 7 of the SpecBlock paper: acceptance rates, shaded answers, trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from paper_measure import DrafterFigures
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_specblock.cli.draft_tree import forward_colour, legend_line, save_svg, terminal_tree
from vllm_specblock.train.eval.steps import Step

matplotlib.use("Agg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

PROMPT = "Write a Python function to compute the Fibonacci sequence."
"""The paper's own (appendix E)."""
DRAFTERS = ("#222222", "#c1121f", "#2a6f4e", "#7b4fb0")
"""Lines of drafter 1, 2, …: none of the colours of drafter forwards."""
COLUMNS = 64
"""Letters of a line of a shaded answer."""


class Origin(StrEnum):
    """Origin of a committed token."""

    PREFILL = "prefill"  # the target's first token, before anything was drafted
    ACCEPTED = "accepted"
    BONUS = "bonus"


COLOURS = {Origin.PREFILL: "#e9ecef", Origin.ACCEPTED: "#a8dda8", Origin.BONUS: "#f4a6a6"}


@dataclass(frozen=True)
class Case:
    """Steps of one drafter along a greedy answer; forward_name: "block" or "level"."""

    steps: list[Step]
    forward_name: str

    def as_json(self, tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, Any]:
        """Return the first `count` committed tokens and the first step's tree."""
        first, tokens = self.steps[0], committed_tokens(self.steps)[:count]
        return {
            "tokens": [
                {"text": tokenizer.decode([token]), "origin": str(origin)}
                for token, origin in tokens
            ],
            "tree": {
                "text": [tokenizer.decode([token]) for token in first.token],
                "parent": first.parent,
                "probability": [first.probability(n) for n in range(len(first.token))],
                "forward": first.forward,
                "accepted": first.accepted,
                "bonus": None if first.bonus is None else tokenizer.decode([first.bonus]),
            },
        }


def committed_tokens(steps: Sequence[Step]) -> list[tuple[int, Origin]]:
    """Return the tokens that the first steps of a text commit, in order."""
    found = [(step.token[0], Origin.PREFILL) for step in steps[:1]]
    for step in steps:
        found += [(step.token[node], Origin.ACCEPTED) for node in step.accepted[1:]]
        if step.bonus is not None:
            found.append((step.bonus, Origin.BONUS))
    return found


def plot_alpha(drafters: dict[str, DrafterFigures], path: Path) -> None:
    """Draw figure 5a: α_k along the main path; thick lines are means over the sets."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    for index, (name, found) in enumerate(drafters.items()):
        each_set = [figures.main_path.alpha for figures in found.sets.values()]
        _lines(axes, found.alpha, each_set, DRAFTERS[index % len(DRAFTERS)], name)
    axes.set_ylabel("acceptance rate α$_k$")
    axes.set_xlabel("k, position on the main path")
    axes.set_title("first choice accepted, given that all before it were", fontsize=10)
    _save(figure, path)


def plot_block_alpha(drafters: dict[str, DrafterFigures], path: Path) -> None:
    """Draw figure 5b for drafters of blocks: α_{m,j}, position j of block m after m − 1 blocks that
    were right."""
    figure, every = pyplot.subplots(
        1, len(drafters), sharey=True, squeeze=False, figsize=(4.2 * len(drafters), 3.6)
    )
    for axes, (name, found) in zip(every[0], drafters.items()):
        chains = [figures.chain.alpha_mj for figures in found.sets.values() if figures.chain]
        for m, block in enumerate(found.alpha_mj or [], start=1):
            each_set = [chain[m - 1] for chain in chains]
            _lines(axes, block, each_set, forward_colour(m), f"block {m}")
            axes.set_xticks(range(1, len(block) + 1))
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("j, position in the block")
    every[0][0].set_ylabel("acceptance rate α$_{m,j}$")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _lines(
    axes: Axes,
    mean: list[float | None],
    each_set: list[list[float | None]],
    colour: str,
    name: str,
) -> None:
    """Draw rates by position, 0 to 1: one thick line, and thin ones."""
    thin: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.4}
    thick: dict[str, Any] = {"linewidth": 2.2, "marker": "o", "label": name}
    for values, how in [*((each, thin) for each in each_set), (mean, thick)]:
        there = [(k, value) for k, value in enumerate(values, start=1) if value is not None]
        axes.plot([k for k, _ in there], [value for _, value in there], color=colour, **how)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def save_text(
    cases: dict[str, Case], tokenizer: PreTrainedTokenizerBase, count: int, path: Path
) -> None:
    """Draw figure 6: the first `count` committed tokens of each drafter, shaded by their origin."""
    grid = Table.grid(*[""] * len(cases))
    pages = []
    for name, case in cases.items():
        committed, page = committed_tokens(case.steps), Text()
        for word, origin in _words(committed[:count], tokenizer):
            page.append(word, style=f"#000000 on {COLOURS[origin]}")
        pages.append(Panel(page.append("…" * (len(committed) > count)), title=name))
    grid.add_row(*pages)
    keys = Text("  ").join(
        Text(f" {origin} ", style=f"#000000 on {COLOURS[origin]}") for origin in Origin
    )
    save_svg(path, "committed tokens", grid, keys, width=COLUMNS * len(cases))


def _words(
    tokens: list[tuple[int, Origin]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, Origin]]:
    """Return each token's text. Where several tokens make one letter, the last one shows it."""
    words, before, ids = [], "", []
    for token, origin in tokens:
        ids.append(token)
        whole = tokenizer.decode(ids).rstrip("\ufffd")
        words.append((whole[len(before) :], origin))
        before = whole
    return words


def save_trees(cases: dict[str, Case], tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Draw figure 7: the first step's trees side by side, coloured by drafter forward."""
    grid, legend = Table.grid(*[""] * len(cases), padding=(0, 2)), Text()
    trees = []
    for name, case in cases.items():
        first = case.steps[0]
        title = f"{name}: forwards {max(first.forward)}, accepted {first.accepted_length}"
        trees.append(Panel(terminal_tree(first, tokenizer, case.forward_name), title=title))
        legend.append(legend_line(max(first.forward), case.forward_name)).append("\n")
    grid.add_row(*trees)
    save_svg(path, "draft trees", grid, legend)
