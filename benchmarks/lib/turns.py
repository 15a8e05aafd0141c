"""Turns of engines that answer the same prompt batches, and the table of their ratios to plain."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.engines import FIXED_NODES
from lib.results_store import markdown_table
from vllm_specblock.engine.metrics.acceptance import acceptance_length_of

PLAIN, PLAIN_V2, RIVAL, RANDOM = "plain", "plain-v2", "vllm-ngram", "random"
FIRST, LATER = "first", "later"
Record = dict[str, Any]
"""One engine's turn: set, phase, wall, cpu, plain_wall, plain_cpu, counters, different."""


@dataclass(frozen=True)
class Turn:
    """A prompt batch that every engine answers before the next one.

    Attributes:
        phase: FIRST, or LATER from `first_steps` plain decode steps on.
    """

    number: int
    set: str
    phase: str
    prompts: list[list[int]]

    def job(self, temperature: float, tokens: int) -> dict[str, Any]:
        """The job of `vllm_specblock.engine.offline.answering`."""
        seeds = [1000 * self.number + index for index in range(len(self.prompts))]
        return {
            "prompts": self.prompts,
            "seeds": seeds,
            "temperature": temperature,
            "max_tokens": tokens,
            "ignore_eos": True,
        }


def random_prompts(vocabulary: int, count: int, length: int) -> list[list[int]]:
    """Prompts of ids drawn evenly from the vocabulary."""
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def turns_of(
    sets: Mapping[str, Sequence[list[int]]], batch: int, passes: int, tokens: int, first_steps: int
) -> Iterator[Turn]:
    """Batches of each set in turn. Prompts recur only when a set has no more of them."""
    mixed = {name: random.Random(name).sample(each, len(each)) for name, each in sets.items()}
    for number in range(passes * len(mixed)):
        name = [*mixed][number % len(mixed)]
        begin, prompts = number // len(mixed) * batch, mixed[name]
        chosen = [prompts[(begin + index) % len(prompts)] for index in range(batch)]
        phase = FIRST if number * tokens < first_steps else LATER
        yield Turn(number, name, phase, chosen)


def records_of(
    turn: Turn, answers: Mapping[str, dict[str, Any]], runners: Mapping[str, str]
) -> dict[str, Record]:
    """Each engine's turn beside plain vLLM's.

    Args:
        runners: "V1" or "V2" by engine. `different` counts answers that are not plain vLLM's on
            the same model runner, where it took part.
    """
    plain, found = answers[PLAIN], {}
    for name, runner in runners.items():
        answer, same = answers[name], PLAIN_V2 if runner == "V2" and PLAIN_V2 in answers else PLAIN
        pairs = zip(answer["ids"], answers[same]["ids"], strict=True)
        found[name] = {
            "set": turn.set,
            "phase": turn.phase,
            "wall": answer["wall"],
            "cpu": answer["cpu"],
            "plain_wall": plain["wall"],
            "plain_cpu": plain["cpu"],
            "counters": answer["counters"],
            "tokens": sum(map(len, answer["ids"])),
            "different": sum(ours != theirs for ours, theirs in pairs),
        }
    return found


def ratio(records: Iterable[Record], clock: str) -> float:
    """Speed over plain vLLM by "wall" or "cpu"; not a number without records."""
    those = [*records]
    own = sum(each[clock] for each in those)
    return sum(each[f"plain_{clock}"] for each in those) / own if own else math.nan


def error(records: Sequence[Record], clock: str) -> float:
    """Standard error of `ratio`, from how it varies between turns."""
    ratios = [each[f"plain_{clock}"] / each[clock] for each in records]
    if len(ratios) < 2:
        return math.nan
    return statistics.stdev(ratios) / math.sqrt(len(ratios))


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """One engine's figures in one cell."""
    phases = {phase: [r for r in records if r["phase"] == phase] for phase in (FIRST, LATER)}
    sets = {r["set"]: None for r in records}
    by_set = {name: ratio([r for r in records if r["set"] == name], "cpu") for name in sets}
    count = sum(r["tokens"] for r in records)
    texts = [value for name, value in by_set.items() if name != RANDOM]
    return {
        **{
            f"{phase}_{clock}": ratio(those, clock)
            for phase, those in phases.items()
            for clock in ("cpu", "wall")
        },
        "error": error(phases[LATER], "cpu"),
        "sets": by_set,
        "mean_of_sets": statistics.mean(texts) if texts else math.nan,
        "tau": acceptance_length_of(r["counters"] for r in records),
        "cpu_ms_per_token": 1e3 * sum(r["cpu"] for r in records) / count,
        "different": sum(r["different"] for r in records),
    }


def over(found: Mapping[str, dict[str, Any]], name: str, others: Iterable[str]) -> float:
    """CPU speed over the best of `others`, after the first steps; not a number without them."""
    best = max((found[o]["later_cpu"] for o in others if o in found), default=math.nan)
    return found[name]["later_cpu"] / best


def table(cells: Mapping[str, Mapping[str, Sequence[Record]]]) -> str:
    """A row per cell and engine."""
    rows = [
        [
            *("cell", "engine", "first, CPU (wall)", "later, CPU (wall)", "±"),
            *("mean of sets", "worst set", "/ vLLM's ngram", "/ best fixed"),
            *("τ", "CPU ms/token", "answers that differ"),
        ]
    ]
    for cell, engines in cells.items():
        found = {name: figures(records) for name, records in engines.items()}
        for name, each in found.items():
            worst = min(each["sets"], key=each["sets"].__getitem__)
            fixed = [f"{name}-{nodes}" for nodes in FIXED_NODES]
            first, later = (
                f"{_text(each[f'{phase}_cpu'])} ({_text(each[f'{phase}_wall'])})"
                for phase in (FIRST, LATER)
            )
            rows.append(
                [
                    *(cell, name, first, later, _text(each["error"], 3)),
                    *(_text(each["mean_of_sets"]), f"{_text(each['sets'][worst])} {worst}"),
                    *(_text(over(found, name, [RIVAL])), _text(over(found, name, fixed))),
                    *(_text(each["tau"]), _text(each["cpu_ms_per_token"])),
                    str(each["different"]),
                ]
            )
    return markdown_table(rows)


def _text(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"
