"""A draft tree in the terminal: a line per node, coloured by the drafter forward it comes from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from vllm_specblock.bench.figures.style import forward_colour
from vllm_specblock.train.eval.steps import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def terminal_tree(step: Step, tokenizer: PreTrainedTokenizerBase, name: str) -> Tree:
    """Every node of a step's tree, best siblings first; accepted ones are marked ✓.

    Args:
        tokenizer: the target's.
        name: what a drafter forward adds, "block" or "level". Its first letter and the forward's
            number stand on each line, for those who see no colours.
    """

    def quoted(token: int) -> str:
        return json.dumps(tokenizer.decode([token]), ensure_ascii=False)

    taken = set(step.accepted)
    root = Tree(Text(f"{quoted(step.token[0])}  root", style="bold"), guide_style="dim")
    branches = [root]
    for node in range(1, len(step.token)):
        forward, right = step.forward[node], node in taken
        line = Text(quoted(step.token[node]), style=forward_colour(forward))
        line.append(f"  {step.probability(node):.2f}  {name[0]}{forward}")
        if right:
            line.append("  ✓")
            line.stylize("bold")
        branches.append(branches[step.parent[node]].add(line))
    if step.bonus is not None:
        line = Text(f"{quoted(step.bonus)}  bonus token", style="bold red")
        branches[step.accepted[-1]].add(line)
    return root


def legend_line(forwards: int, name: str) -> Text:
    """What the colours say."""
    line = Text("Token, its probability after its parent, and the drafter forward: ")
    for number in range(1, forwards + 1):
        line.append(f"{name[0]}{number} {name} {number}  ", style=forward_colour(number))
    line.append("✓ accepted", style="bold")
    return line
