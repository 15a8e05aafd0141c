"""Draft trees in the terminal: nodes in the colour of their drafter forward, the accepted path."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text
from rich.tree import Tree

from vllm_specblock.train.eval.steps import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORWARDS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#17a2b8", "#c9a227", "#9c755f", "#e377c2")
"""Of drafter forward 1, 2, …, repeated from the first on."""


def forward_colour(forward: int) -> str:
    """Return the colour of drafter forward 1, 2, …."""
    return FORWARDS[(forward - 1) % len(FORWARDS)]


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


def save_svg(path: Path, title: str, *parts: RenderableType, width: int | None = None) -> None:
    """Save the output of a terminal of `width` columns; None: as wide as the widest part."""
    console = Console(record=True, file=io.StringIO(), width=1000)
    console.width = width or max(console.measure(part).maximum for part in parts)
    console.print(*parts, sep="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(path), title=title, theme=DEFAULT_TERMINAL_THEME)
