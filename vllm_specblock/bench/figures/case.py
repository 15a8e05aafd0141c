"""One prompt in detail: the first tree and the shaded answer of each drafter (figures 6 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specblock.bench.figures.shaded_text import (
    Committed,
    Origin,
    committed_tokens,
    plot_shaded_text,
)
from vllm_specblock.bench.figures.style import pyplot, save
from vllm_specblock.bench.figures.tree_picture import (
    draw_tree,
    extent,
    forward_legend,
    picture_of,
)
from vllm_specblock.train.eval.steps import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT = "Write a Python function to compute the Fibonacci sequence."
"""The paper's own (appendix E)."""


@dataclass(frozen=True)
class Case:
    """What one drafter does after the prompt.

    Attributes:
        steps: verification steps of the target's greedy answer, from its first token on.
        forward_name: what a drafter forward adds, "block" or "level".
    """

    steps: list[Step]
    forward_name: str

    def shown(self, count: int) -> list[Committed]:
        """The first `count` committed tokens."""
        return committed_tokens(self.steps)[:count]

    def as_json(self, tokenizer: PreTrainedTokenizerBase, count: int) -> dict[str, Any]:
        first = self.steps[0]
        return {
            "tokens": [
                {"text": tokenizer.decode([token]), "origin": str(origin)}
                for token, origin in self.shown(count)
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


def plot_trees(cases: dict[str, Case], tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Figure 7: the first step's trees side by side, coloured by drafter forward."""
    pictures = {name: picture_of(case.steps[0], tokenizer) for name, case in cases.items()}
    sizes = [extent(picture) for picture in pictures.values()]
    figure, every = pyplot().subplots(
        1,
        len(cases),
        squeeze=False,
        figsize=(sum(wide for wide, _ in sizes), max(high for _, high in sizes)),
        width_ratios=[wide for wide, _ in sizes],
    )
    for axes, (name, case) in zip(every[0], cases.items()):
        first = case.steps[0]
        draw_tree(axes, pictures[name], forward_legend(max(first.forward), case.forward_name))
        count = max(first.forward)
        axes.set_title(
            f"{name}: {count} drafter forward{'' if count == 1 else 's'}, "
            f"{first.accepted_length} tokens accepted",
            fontsize=10,
            pad=42,
        )
    save(figure, path)


def plot_text(
    cases: dict[str, Case], tokenizer: PreTrainedTokenizerBase, count: int, path: Path
) -> None:
    """Figure 6: the first `count` committed tokens of each drafter, shaded by their origin."""
    answers = {name: _words(case.shown(count), tokenizer) for name, case in cases.items()}
    more = [name for name, case in cases.items() if len(committed_tokens(case.steps)) > count]
    plot_shaded_text(answers, path, more)


def _words(tokens: list[Committed], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, Origin]]:
    """Each token's text. Where several tokens make one letter, the last of them shows it."""
    words, before, ids = [], "", []
    for token, origin in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        whole = text.rstrip("\ufffd")
        words.append((whole[len(before) :], origin))
        before = whole
    return words
