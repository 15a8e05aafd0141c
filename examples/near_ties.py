"""Where two answers in bfloat16 part, how far apart were the two tokens?

Two ways to compute the same logits in bfloat16 differ in their last bits. Where the best two tokens
are as close as that, either may win, and the rest of the answer follows. transformers computes the
logits at that place once more, in float32, which tells such a tie from a mistake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Parting:
    """The first position at which two answers differ.

    Attributes:
        position: of the answer, 0-based.
        tokens: the two tokens as text; logits: theirs, in float32.
        step: between two neighbouring numbers of bfloat16 at the larger of these logits.
    """

    position: int
    tokens: tuple[str, str]
    logits: tuple[float, float]
    step: float

    @property
    def steps(self) -> float:
        """How far apart the logits are, in steps of bfloat16."""
        return abs(self.logits[0] - self.logits[1]) / self.step

    def __str__(self) -> str:
        first, second = self.tokens
        return (
            f"token {self.position}: {first!r} {self.logits[0]:.4f}, "
            f"{second!r} {self.logits[1]:.4f}: {abs(self.logits[0] - self.logits[1]):.4f} apart, "
            f"{self.steps:.2f} of bfloat16's step of {self.step:g}"
        )


def bfloat16_step(value: float) -> float:
    """The distance of bfloat16's numbers, of 8 significant bits, around `value`."""
    return 2.0 ** (math.frexp(value)[1] - 8)


def first_difference(one: list[int], other: list[int]) -> int:
    """The first position at which they differ, or the end of the shorter one."""
    both = enumerate(zip(one, other))
    return next((i for i, (a, b) in both if a != b), min(len(one), len(other)))


def explain(target: Path, partings: list[tuple[list[int], list[int], list[int]]]) -> list[Parting]:
    """Look at each (prompt, one answer, another answer), ids each, which must differ."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found = []
    for prompt, one, other in partings:
        position = first_difference(one, other)
        pair = [one[position], other[position]]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + one[:position]])).logits[0, -1, pair].tolist()
        step = bfloat16_step(max(map(abs, logits)))
        words = tuple(tokenizer.decode([token]) for token in pair)
        found.append(Parting(position, words, tuple(logits), step))
    return found
