"""How close the two tokens were where two greedy answers differ.

Two ways to compute logits in bfloat16 differ in the last bits. If the best two tokens are that
close, either may win, and the rest of the answer changes. The float32 logits of transformers at
that position tell such a tie from a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_specblock.bench.questions import units
from vllm_specblock.bench.run import Bench

Answers = tuple[list[int], list[int], list[int]]
"""Prompt, one answer, another answer; token ids."""


@dataclass(frozen=True)
class Parting:
    """The first position at which two answers differ.

    Attributes:
        position: in the answer, 0-based.
        tokens: the two tokens as text; logits: in float32.
        steps: distance of the logits, in steps of bfloat16 at the larger one.
    """

    position: int
    tokens: list[str]
    logits: list[float]
    steps: float

    def __str__(self) -> str:
        pair = ", ".join(f"{t!r} {logit:.4f}" for t, logit in zip(self.tokens, self.logits))
        return f"token {self.position}: {pair}: {self.steps:.2f} of bfloat16's step apart"


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
        position = _first_difference(one, other)
        if position is None:
            found.append(None)
            continue
        pair = [one[position], other[position]]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + one[:position]])).logits[0, -1, pair].tolist()
        steps = abs(logits[0] - logits[1]) / bfloat16_step(max(map(abs, logits)))
        found.append(Parting(position, tokenizer.batch_decode([[t] for t in pair]), logits, steps))
    return found


def explain_differences(bench: Bench, plain_of: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Return method, set, question, steps (None: an answer ends) and a sentence of each difference.

    Of each chat, the first turn that differs: later ones have other prompts.

    Args:
        plain_of: by method, the plain vLLM to compare with; None: there is none.
    """
    found: dict[tuple[str, str, str], Answers] = {}
    greedy = {unit.key(): unit for unit in units(bench.config, bench.sets) if not unit.temperature}
    for record in bench.store.records:
        for name, other in plain_of.items():
            if record.unit not in greedy or not {name, other} <= record.answers.keys():
                continue
            both = (record.answers[each].ids for each in (other or "", name))
            for question, plain, ours in zip(greedy[record.unit].questions, *both):
                turn = _first_difference(plain, ours)
                if turn is not None:
                    prompt = bench.reader.prompt(question, plain[:turn])
                    where = name, record.set, question.id
                    found.setdefault(where, (prompt, plain[turn], ours[turn]))
    partings = explain(bench.config.target, [*found.values()]) if found else []
    return [
        {
            "method": method,
            "set": name,
            "question": question,
            "steps": parting and round(parting.steps, 3),
            "says": str(parting or "one answer ends where the other continues"),
        }
        for (method, name, question), parting in zip(found, partings)
    ]


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first index at which both have an item and the items differ."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
