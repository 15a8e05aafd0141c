"""Where two answers in bfloat16 part, how far apart were the two tokens?

Two ways to compute the same logits in bfloat16 differ in their last bits. Where the best two tokens
are as close as that, either may win, and the rest of the answer follows. transformers computes the
logits at that place once more, in float32, which tells such a tie from a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_specblock.bench.run import Bench
from vllm_specblock.bench.schedule import Unit, units
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
        """How far apart the logits are, in steps of bfloat16."""
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
    """A greedy answer that is not plain vLLM's.

    Attributes:
        method, set, question: whose, and to what.
        prompt, plain, ours: token ids.
    """

    method: str
    set: str
    question: str
    prompt: list[int]
    plain: list[int]
    ours: list[int]


def differences(bench: Bench, plain_of: dict[str, str | None]) -> list[Difference]:
    """Every one of a run, once, whatever the rounds.

    Args:
        plain_of: by method, the plain vLLM whose outputs it should have; None: there is none.
            Where a chat has already gone another way, there is nothing to compare.
    """
    found = {}
    for unit in units(bench.config, bench.sets):
        if unit.temperature:
            continue
        for method, plain in plain_of.items():
            if plain is None or bench.store.missing(unit, [method], [plain]):
                continue
            for place, question in enumerate(unit.questions):
                prompts = [_prompt(bench, unit, place, name) for name in (plain, method)]
                theirs, ours = (bench.store.ids(unit, name, place) for name in (plain, method))
                if prompts[0] == prompts[1] and theirs != ours:
                    key = method, unit.set, question.id, unit.turn, tuple(theirs), tuple(ours)
                    found[key] = Difference(method, unit.set, question.id, prompts[0], theirs, ours)
    return [*found.values()]


def _prompt(bench: Bench, unit: Unit, place: int, name: str) -> list[int]:
    said = bench.store.answers_before(unit, name)[place]
    return bench.reader.prompt(unit.questions[place], said)


def page(target: Path, found: Sequence[Difference]) -> tuple[str, list[dict[str, object]]]:
    """Look at all differences: in Markdown, and as JSON's types."""
    places = {_place(each): each for each in found}
    # An answer that only goes on where the other ends has no second token to look at.
    pairs = {place: each for place, each in places.items() if len(place[1]) == 2}
    looked: dict[_Place, Parting] = dict(
        zip(
            pairs,
            explain(target, [(each.prompt, each.plain, each.ours) for each in pairs.values()]),
        )
    )
    head = ["method", "answers that differ", "two logits within one bfloat16 step", "farthest"]
    rows, lines = [head], []
    facts: list[dict[str, object]] = []
    for method in dict.fromkeys(each.method for each in found):
        steps = []
        for each in found:
            if each.method == method:
                parting = looked.get(_place(each))
                steps.append(parting.steps if parting else math.inf)
                said = str(parting) if parting else "one answer ends where the other goes on"
                lines.append(f"- {method}, {each.set}/{each.question}: {said}")
                named = {"method": method, "set": each.set, "question": each.question}
                steps_apart = parting and round(parting.steps, 3)
                facts.append({**named, "steps": steps_apart, "says": said})
        near = sum(step <= 1 for step in steps)
        rows.append([method, str(len(steps)), str(near), f"{max(steps):.2f} steps"])
    return markdown_table(rows) + "\n\n" + "\n".join(lines), facts


_Place = tuple[tuple[int, ...], tuple[int, ...]]


def _place(each: Difference) -> _Place:
    """What one look answers: the text so far, and the two tokens."""
    at = first_difference(each.plain, each.ours)
    pair = each.plain[at : at + 1] + each.ours[at : at + 1]
    return tuple(each.prompt + each.plain[:at]), tuple(pair)


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
