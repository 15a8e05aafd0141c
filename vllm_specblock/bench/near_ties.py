"""How close the two tokens were where two answers in bfloat16 differ.

Two ways to compute logits in bfloat16 differ in the last bits. If the best two tokens are that
close, either may win, and the rest of the answer changes. The float32 logits of transformers at
that position tell such a tie from a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_specblock.bench.run import Bench
from vllm_specblock.bench.schedule import units


@dataclass(frozen=True)
class Parting:
    """The first position at which two answers differ.

    Attributes:
        position: in the answer, 0-based.
        tokens: the two tokens as text; logits: in float32.
        step: distance of neighbouring bfloat16 numbers at the larger logit.
    """

    position: int
    tokens: tuple[str, str]
    logits: tuple[float, float]
    step: float

    @property
    def steps(self) -> float:
        """Distance of the logits in bfloat16 steps."""
        return abs(self.logits[0] - self.logits[1]) / self.step

    def __str__(self) -> str:
        pair = ", ".join(f"{t!r} {logit:.4f}" for t, logit in zip(self.tokens, self.logits))
        return (
            f"token {self.position}: {pair}: {self.steps * self.step:.4f} apart, "
            f"{self.steps:.2f} of bfloat16's step of {self.step:g}"
        )


class Difference(NamedTuple):
    """A method's greedy answer to a question that differs from plain vLLM's; token ids."""

    method: str
    set: str
    question: str
    prompt: list[int]
    plain: list[int]
    ours: list[int]


def differences(bench: Bench, plain_of: Mapping[str, str | None]) -> list[Difference]:
    """Return each difference of a run once, over all rounds.

    Args:
        plain_of: by method, the plain vLLM to compare with; None: there is none.
            Turns after a difference have other prompts and are not compared.
    """
    found: list[Difference] = []
    chosen = {unit.key(): unit for unit in units(bench.config, bench.sets)}
    for record in bench.store.records:
        unit = chosen.get(record.unit)
        for name, other in plain_of.items():
            if unit is None or unit.temperature or other is None:
                continue
            if not {name, other} <= record.answers.keys():
                continue
            both = (record.answers[each].ids for each in (other, name))
            for question, plain, ours in zip(unit.questions, *both):
                turn = next((i for i, (a, b) in enumerate(zip(plain, ours)) if a != b), None)
                if turn is not None:
                    prompt = bench.reader.prompt(question, plain[:turn])
                    each = Difference(name, unit.set, question.id, prompt, plain[turn], ours[turn])
                    found += [each] * (each not in found)
    return found


def page(target: Path, found: Sequence[Difference]) -> tuple[str, list[dict[str, object]]]:
    """Explain all differences, in Markdown and as JSON types."""
    partings = explain(target, [each[3:] for each in found])
    facts: list[dict[str, object]] = [
        {
            "method": each.method,
            "set": each.set,
            "question": each.question,
            "steps": parting and round(parting.steps, 3),
            "says": str(parting or "one answer ends where the other continues"),
        }
        for each, parting in zip(found, partings)
    ]
    near = sum(parting is not None and parting.steps <= 1 for parting in partings)
    lines = [f"{near} of {len(found)}: two logits within one step of bfloat16.", ""]
    lines += ["- {method}, {set}/{question}: {says}".format(**fact) for fact in facts]
    return "\n".join(lines), facts


def bfloat16_step(value: float) -> float:
    """Return the distance of neighbouring bfloat16 numbers (8 significant bits) at `value`."""
    return 2.0 ** (math.frexp(value)[1] - 8)


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
        position = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
        if position is None:
            found.append(None)
            continue
        pair = [one[position], other[position]]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + one[:position]])).logits[0, -1, pair].tolist()
        step = bfloat16_step(max(map(abs, logits)))
        words = tokenizer.decode(pair[:1]), tokenizer.decode(pair[1:])
        found.append(Parting(position, words, (logits[0], logits[1]), step))
    return found
