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

import torch

from vllm_specblock.bench.questions import units
from vllm_specblock.bench.run import Bench

Where = tuple[str, str, str]
"""Method, set and question."""
Answers = tuple[list[int], list[int], list[int]]
"""Prompt, one answer, another answer; token ids."""


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


def differences(bench: Bench, plain_of: Mapping[str, str | None]) -> dict[Where, Answers]:
    """Return prompt, plain vLLM's answer and the method's where greedy answers differ.

    Of each chat, the first turn that differs: later ones have other prompts.

    Args:
        plain_of: by method, the plain vLLM to compare with; None: there is none.
    """
    found: dict[Where, Answers] = {}
    greedy = {unit.key(): unit for unit in units(bench.config, bench.sets) if not unit.temperature}
    for record in bench.store.records:
        for name, other in plain_of.items():
            if other is None or record.unit not in greedy:
                continue
            if not {name, other} <= record.answers.keys():
                continue
            both = (record.answers[each].ids for each in (other, name))
            for question, plain, ours in zip(greedy[record.unit].questions, *both):
                turn = first_difference(plain, ours)
                if turn is not None:
                    prompt = bench.reader.prompt(question, plain[:turn])
                    answers = prompt, plain[turn], ours[turn]
                    found.setdefault((name, record.set, question.id), answers)
    return found


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first index at which both have an item and the items differ."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)


def page(target: Path, found: Mapping[Where, Answers]) -> tuple[str, list[dict[str, object]]]:
    """Explain all differences, in Markdown and as JSON types."""
    facts: list[dict[str, object]] = []
    for where, parting in zip(found, explain(target, [*found.values()])):
        says = str(parting or "one answer ends where the other continues")
        steps = parting and round(parting.steps, 3)
        named = zip(("method", "set", "question"), where)
        facts.append({**dict(named), "steps": steps, "says": says})
    near = sum(isinstance(each["steps"], float) and each["steps"] <= 1 for each in facts)
    lines = [f"{near} of {len(found)}: two logits within one step of bfloat16.", ""]
    lines += ["- {method}, {set}/{question}: {says}".format(**fact) for fact in facts]
    return "\n".join(lines), facts


def bfloat16_step(value: float) -> float:
    """Return the distance of neighbouring bfloat16 numbers (8 significant bits) at `value`."""
    return 2.0 ** (math.frexp(value)[1] - 8)


def explain(target: Path, answers: Sequence[Answers]) -> list[Parting | None]:
    """Return where two answers differ; None: one of them ends there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found: list[Parting | None] = []
    for prompt, one, other in answers:
        position = first_difference(one, other)
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
