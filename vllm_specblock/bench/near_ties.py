"""How close the two tokens were where two answers in bfloat16 differ.

Two ways to compute the same logits in bfloat16 differ in their last bits. Where the best two tokens
are that close, either may win, and the rest of the answer follows. transformers computes the logits
at that position again, in float32, which separates such a tie from a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_specblock.bench.run import Bench
from vllm_specblock.bench.schedule import units
from vllm_specblock.bench.table import markdown_table


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
        """The distance of the logits, in steps of bfloat16."""
        return abs(self.logits[0] - self.logits[1]) / self.step

    def __str__(self) -> str:
        first, second = self.tokens
        return (
            f"token {self.position}: {first!r} {self.logits[0]:.4f}, "
            f"{second!r} {self.logits[1]:.4f}: {abs(self.logits[0] - self.logits[1]):.4f} apart, "
            f"{self.steps:.2f} of bfloat16's step of {self.step:g}"
        )


@dataclass(frozen=True)
class Difference:
    """A method's greedy answer to a question that differs from plain vLLM's; token ids."""

    method: str
    set: str
    question: str
    prompt: list[int]
    plain: list[int]
    ours: list[int]


def differences(bench: Bench, plain_of: dict[str, str | None]) -> list[Difference]:
    """Return each difference of a run once, over all rounds.

    Args:
        plain_of: by method, the plain vLLM whose outputs it should have; None: there is none.
            Turns after a difference have other prompts and are not compared.
    """
    found = {}
    for unit in units(bench.config, bench.sets):
        for method, plain in plain_of.items():
            if unit.temperature or plain is None or bench.store.missing(unit, [method], [plain]):
                continue
            before = [bench.store.answers_before(unit, name) for name in (plain, method)]
            for place, question in enumerate(unit.questions):
                theirs, ours = (bench.store.ids(unit, name, place) for name in (plain, method))
                prompt, other = (bench.reader.prompt(question, said[place]) for said in before)
                if prompt == other and theirs != ours:
                    key = method, unit.set, question.id, unit.turn, tuple(theirs), tuple(ours)
                    found[key] = Difference(method, unit.set, question.id, prompt, theirs, ours)
    return [*found.values()]


def page(target: Path, found: Sequence[Difference]) -> tuple[str, list[dict[str, object]]]:
    """Explain all differences: in Markdown, and as JSON's types."""
    partings = explain(target, [(each.prompt, each.plain, each.ours) for each in found])
    facts: list[dict[str, object]] = []
    steps: dict[str, list[float]] = {}
    for each, parting in zip(found, partings):
        steps.setdefault(each.method, []).append(parting.steps if parting else math.inf)
        facts.append(
            {
                "method": each.method,
                "set": each.set,
                "question": each.question,
                "steps": parting and round(parting.steps, 3),
                "says": str(parting) if parting else "one answer ends where the other goes on",
            }
        )
    rows = [["method", "answers that differ", "two logits within one bfloat16 step", "farthest"]]
    for method, those in steps.items():
        near = sum(step <= 1 for step in those)
        rows.append([method, str(len(those)), str(near), f"{max(those):.2f} steps"])
    lines = ["- {method}, {set}/{question}: {says}".format(**fact) for fact in facts]
    return markdown_table(rows) + "\n\n" + "\n".join(lines), facts


def bfloat16_step(value: float) -> float:
    """Return the distance of bfloat16's numbers, of 8 significant bits, around `value`."""
    return 2.0 ** (math.frexp(value)[1] - 8)


def first_difference(one: list[int], other: list[int]) -> int:
    """Return the first position at which they differ, or the end of the shorter one."""
    both = enumerate(zip(one, other))
    return next((i for i, (a, b) in both if a != b), min(len(one), len(other)))


def explain(
    target: Path, answers: Sequence[tuple[list[int], list[int], list[int]]]
) -> list[Parting | None]:
    """Look at each (prompt, one answer, another answer), ids each; None: one of them ends there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found: list[Parting | None] = []
    for prompt, one, other in answers:
        position = first_difference(one, other)
        if position == min(len(one), len(other)):
            found.append(None)
            continue
        pair = [one[position], other[position]]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + one[:position]])).logits[0, -1, pair].tolist()
        step = bfloat16_step(max(map(abs, logits)))
        words = tokenizer.decode(pair[:1]), tokenizer.decode(pair[1:])
        found.append(Parting(position, words, (logits[0], logits[1]), step))
    return found
