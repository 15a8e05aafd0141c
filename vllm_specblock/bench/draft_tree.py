"""A draft tree in the terminal and as a picture: nodes by drafter forward, the accepted path."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from vllm_specblock.config import OptionError
from vllm_specblock.train.eval.steps import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

FORWARDS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1"),
    *("#17a2b8", "#c9a227", "#9c755f", "#e377c2"),
)
"""Of drafter forward 1, 2, …, repeated from the first on."""
ACCEPTED = "#c1121f"
"""Edges and borders of the accepted path."""
BONUS = "#f4a6a6"
"""Shade of bonus tokens."""
ROOT_COLOUR = "#d9d9d9"


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


def terminal_tree(step: Step, tokenizer: PreTrainedTokenizerBase, name: str) -> Tree:
    """Return every node of a step's tree, best siblings first; accepted ones are marked ✓.

    Args:
        tokenizer: the target's.
        name: what a drafter forward adds, "block" or "level". Its first letter and the forward's
            number stand on each line, for terminals without colours.
    """

    def quoted(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    root = Tree(Text(f"{quoted(step.token[0])}  root", style="bold"), guide_style="dim")
    branches = [root]
    for node in range(1, len(step.token)):
        forward = step.forward[node]
        line = Text(quoted(step.token[node]), style=forward_colour(forward))
        line.append(f"  {step.probability(node):.2f}  {name[0]}{forward}")
        if node in step.accepted:
            line.append("  ✓")
            line.stylize("bold")
        branches.append(branches[step.parent[node]].add(line))
    if step.bonus is not None:
        line = Text(f"{quoted(step.bonus)}  bonus token", style="bold red")
        branches[step.accepted[-1]].add(line)
    return root


def legend_line(forwards: int, name: str) -> Text:
    line = Text("Token, its probability after its parent, and the drafter forward: ")
    for number in range(1, forwards + 1):
        line.append(f"{name[0]}{number} {name} {number}  ", style=forward_colour(number))
    line.append("✓ accepted", style="bold")
    return line


def layout(parent: list[int]) -> list[tuple[float, float]]:
    """Return (depth, height) of every node: leaves one below the other, parents amid children.

    Args:
        parent: −1 for the root; parents first.
    """
    children: list[list[int]] = [[] for _ in parent]
    depth = [0] * len(parent)
    for node, up in enumerate(parent):
        if up >= 0:
            children[up].append(node)
            depth[node] = depth[up] + 1
    height, leaves = [0.0] * len(parent), itertools.count()

    def place(node: int) -> float:
        below = [place(child) for child in children[node]]
        height[node] = (below[0] + below[-1]) / 2 if below else -float(next(leaves))
        return height[node]

    place(0)
    return list(zip(map(float, depth), height))


def _parents(step: Step) -> list[int]:
    """Parents of all nodes; the bonus token, if any, is the last node."""
    return step.parent if step.bonus is None else [*step.parent, step.accepted[-1]]


def extent(step: Step) -> tuple[float, float]:
    """Return the width and height of a tree's picture, in inches."""
    places = layout(_parents(step))
    return 2 + 1.25 * max(x for x, _ in places), 1 + 0.26 * (1 - min(y for _, y in places))


def draw_tree(axes: Axes, step: Step, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Draw a step's tree, root on the left; in an SVG, node n has the id "node-n".

    Args:
        name: what a drafter forward adds, "block" or "level".
    """
    from matplotlib.patches import Patch

    parent = _parents(step)
    places = layout(parent)
    colours = [ROOT_COLOUR, *(_pale(forward_colour(n)) for n in range(1, max(step.forward) + 1))]
    for node, up in enumerate(parent):
        (x, y), taken, bonus = places[node], node in step.accepted, node == len(step.token)
        label = shown(tokenizer, step.bonus if bonus else step.token[node])  # type: ignore[arg-type]
        if node and not bonus:
            label += f" {step.probability(node):.2f}"
        if up >= 0:
            axes.plot(
                [places[up][0], x],
                [places[up][1], y],
                color=ACCEPTED if taken or bonus else "#adb5bd",
                linewidth=2.2 if taken else 0.8,
                linestyle=":" if bonus else "-",
                zorder=1,
            )
        axes.text(
            *(x, y, label),
            gid="bonus" if bonus else f"node-{node}",
            fontsize=7,
            family="monospace",
            ha="center",
            va="center",
            parse_math=False,
            fontweight="bold" if taken else "normal",
            bbox={
                "boxstyle": "round,pad=0.25",
                "facecolor": BONUS if bonus else colours[step.forward[node]],
                "edgecolor": ACCEPTED if taken else "#6c757d",
                "linewidth": 1.8 if taken else 0.5,
            },
            zorder=2,
        )
    keys = [Patch(facecolor=colours[n], label=f"{name} {n}") for n in range(1, len(colours))]
    keys.append(Patch(facecolor="white", edgecolor=ACCEPTED, linewidth=1.8, label="accepted"))
    if step.bonus is not None:
        keys.append(Patch(facecolor=BONUS, label="bonus token"))
    axes.legend(
        handles=keys,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    axes.set_xlim(-0.5, max(x for x, _ in places) + 0.5)
    axes.set_ylim(min(y for _, y in places) - 0.7, 0.7)
    axes.axis("off")


def save_tree(step: Step, tokenizer: PreTrainedTokenizerBase, name: str, path: Path) -> None:
    """Draw a step's tree into a file; see `draw_tree`."""
    figure, axes = pyplot().subplots(figsize=extent(step))
    draw_tree(axes, step, tokenizer, name)
    save(figure, path)


def _pale(colour: str) -> str:
    """Return a lighter colour, on which black text is readable."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) * 45 // 100:02x}" for part in parts)
