"""Draft trees in the terminal: nodes in the colour of their drafter forward, the accepted path."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console, Group, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text
from rich.tree import Tree

from vllm_specblock.train.eval.evaluate import sequences_for
from vllm_specblock.train.eval.loaded import LoadedDrafter
from vllm_specblock.train.eval.steps import Step, steps_along

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORWARDS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#17a2b8", "#c9a227", "#9c755f", "#e377c2")


def forward_colour(forward: int) -> str:
    """Return the colour of drafter forward 1, 2, …; they repeat."""
    return FORWARDS[(forward - 1) % len(FORWARDS)]


def terminal_tree(step: Step, tokenizer: PreTrainedTokenizerBase, name: str) -> Tree:
    """Return every node of a step's tree, best siblings first; accepted ones are marked ✓.

    `name` is what a drafter forward adds, "block" or "level".
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


def drawing(step: Step, tokenizer: PreTrainedTokenizerBase, name: str) -> Group:
    """Return a step's tree and its legend."""
    return Group(terminal_tree(step, tokenizer, name), legend_line(max(step.forward), name))


def save_svg(path: Path, title: str, *parts: RenderableType, width: int | None = None) -> None:
    """Save the output of a terminal of `width` columns; None: as wide as the widest part."""
    console = Console(record=True, file=io.StringIO(), width=1000)
    console.width = width or max(console.measure(part).maximum for part in parts)
    console.print(*parts, sep="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(path), title=title, theme=DEFAULT_TERMINAL_THEME)


def steps_of_text(
    target: PreTrainedModel, drafter: LoadedDrafter, text: torch.Tensor, prompt: int
) -> Iterator[Step]:
    """Yield the verification steps along a text [T] int64, after its first `prompt` tokens."""
    (sequence,) = sequences_for(target, drafter.pairing.layer_ids, [text], [prompt])
    return steps_along(drafter.along(sequence), sequence)
