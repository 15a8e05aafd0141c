"""A draft tree as a picture: nodes coloured by kind, the accepted path in bold (figure 7)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specblock.bench.figures.style import ACCEPTED, BONUS, forward_colour, pyplot, save, shown
from vllm_specblock.train.eval.steps import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedTokenizerBase

ROOT_COLOUR = "#d9d9d9"


@dataclass(frozen=True)
class TreePicture:
    """One tree as plain data; entry 0 of each list is the root.

    Attributes:
        text: each node's label.
        parent: each node's parent, −1 for the root; parents first.
        kind: what a node's colour says, such as the drafter forward it comes from; 0: the root.
        accepted: nodes of the accepted path, from the root on.
        bonus: label of the bonus token, drawn behind the accepted path; None: not drawn.
    """

    text: list[str]
    parent: list[int]
    kind: list[int]
    accepted: list[int]
    bonus: str | None = None


@dataclass(frozen=True)
class Legend:
    """What the kinds of a picture are called, and their colours; kind 0 is the root's."""

    name: dict[int, str]
    colour: dict[int, str]


def picture_of(step: Step, tokenizer: PreTrainedTokenizerBase) -> TreePicture:
    """A step's tree; a node's kind is its drafter forward, its label has its probability."""
    text = [shown(tokenizer, token) for token in step.token]
    text[1:] = [f"{word} {step.probability(n):.2f}" for n, word in enumerate(text[1:], start=1)]
    bonus = None if step.bonus is None else shown(tokenizer, step.bonus)
    return TreePicture(text, step.parent, step.forward, step.accepted, bonus)


def forward_legend(forwards: int, name: str) -> Legend:
    """One colour per drafter forward; `name` is what a forward adds, "block" or "level"."""
    numbers = range(1, forwards + 1)
    return Legend(
        {number: f"{name} {number}" for number in numbers},
        {0: ROOT_COLOUR} | {number: _pale(forward_colour(number)) for number in numbers},
    )


def layout(parent: list[int]) -> list[tuple[float, float]]:
    """(depth, height) of every node: leaves one below the other, a parent amid its children.

    Args:
        parent: each node's, −1 for the root; parents first.
    """
    children: list[list[int]] = [[] for _ in parent]
    depth = [0] * len(parent)
    for node, up in enumerate(parent):
        if up >= 0:
            children[up].append(node)
            depth[node] = depth[up] + 1
    height, leaves, stack = [0.0] * len(parent), 0, [(0, False)]
    while stack:
        node, seen = stack.pop()
        below = children[node]
        if below and not seen:
            stack += [(node, True), *((child, False) for child in reversed(below))]
        elif below:
            height[node] = (height[below[0]] + height[below[-1]]) / 2
        else:
            height[node], leaves = -leaves, leaves + 1
    return list(zip(map(float, depth), height))


def extent(picture: TreePicture) -> tuple[float, float]:
    """Inches that a picture wants, wide and high."""
    places = layout(_with_bonus(picture)[0])
    deepest = max(x for x, _ in places)
    leaves = 1 - min(y for _, y in places)
    return 2 + 1.25 * deepest, 1 + 0.26 * leaves


def draw_tree(axes: Axes, picture: TreePicture, legend: Legend) -> None:
    """Draw into matplotlib `axes`, root on the left; in an SVG, node n has the id "node-n"."""
    from matplotlib.patches import Patch

    parent, text = _with_bonus(picture)
    places, on_path = layout(parent), set(picture.accepted)
    for node, up in enumerate(parent):
        (x, y), taken = places[node], node in on_path
        bonus = node == len(picture.parent)
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
            *(x, y, text[node]),
            gid="bonus" if bonus else f"node-{node}",
            fontsize=7,
            family="monospace",
            ha="center",
            va="center",
            parse_math=False,
            fontweight="bold" if taken else "normal",
            bbox={
                "boxstyle": "round,pad=0.25",
                "facecolor": BONUS if bonus else legend.colour[picture.kind[node]],
                "edgecolor": ACCEPTED if taken else "#6c757d",
                "linewidth": 1.8 if taken else 0.5,
            },
            zorder=2,
        )
    keys = [Patch(facecolor=legend.colour[k], label=n) for k, n in legend.name.items()]
    keys.append(Patch(facecolor="white", edgecolor=ACCEPTED, linewidth=1.8, label="accepted"))
    if picture.bonus is not None:
        keys.append(Patch(facecolor=BONUS, label="bonus token"))
    deepest, leaves = max(x for x, _ in places), 1 - min(y for _, y in places)
    axes.legend(
        handles=keys,
        loc="lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
        bbox_to_anchor=(0.5, 1.0),
    )
    axes.set_xlim(-0.5, deepest + 0.5)
    axes.set_ylim(-leaves + 0.3, 0.7)
    axes.axis("off")


def save_tree(picture: TreePicture, legend: Legend, path: Path) -> None:
    """One tree to a file; its suffix says in which format."""
    figure, axes = pyplot().subplots(figsize=extent(picture))
    draw_tree(axes, picture, legend)
    save(figure, path)


def _with_bonus(picture: TreePicture) -> tuple[list[int], list[str]]:
    """Parents and labels with the bonus token as the last node, where there is one."""
    if picture.bonus is None:
        return picture.parent, picture.text
    return [*picture.parent, picture.accepted[-1]], [*picture.text, picture.bonus]


def _pale(colour: str) -> str:
    """A colour that black text can be read on: strong ones are for lines and terminals."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) * 45 // 100:02x}" for part in parts)
