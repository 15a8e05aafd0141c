"""Figures of the table, from answers and their cost [SpecBlock, §4.1]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.store import Answer, Record
from vllm_specblock.engine.metrics.acceptance import acceptance_length

MEAN = "mean"
"""In place of a set's name: the mean over all sets."""

Spread = tuple[float, float] | None


@dataclass(frozen=True)
class Figures:
    """One method on one set at one temperature. None: not known.

    Attributes:
        speedup: Spd: speed over the fastest plain vLLM by wall time, median over units.
        speedup_spread: lowest and highest round's median. None with one round, and for the fastest
            plain vLLM, which is 1.
        speedup_cpu: the same by CPU seconds.
        throughput: Φ, tokens/s of wall time.
        tau: τ, tokens emitted per decode step: `engine/metrics/acceptance.py`.
        draft_ms: T_D, milliseconds of the drafters' forwards per step without prompts.
        draft_share: the same time as a share of all wall time.
        tokens: generated, in all units.
        outputs: answers; different: answers unlike plain vLLM's with the same model runner.
    """

    method: str
    set: str
    temperature: float
    speedup: float | None
    speedup_spread: Spread
    speedup_cpu: float | None
    throughput: float
    tau: float
    draft_ms: float | None
    draft_share: float | None
    tokens: int
    outputs: int
    different: int | None


def fastest(records: Sequence[Record], plain: Sequence[str]) -> str:
    """Return the plain vLLM with the least wall time per token (median ratio of turns).

    Raises:
        BenchError: nothing was answered.
    """
    if not any(plain[0] in record.answers for record in records):
        raise BenchError("There is no answer of plain vLLM to compare with.")
    speeds = {name: _speedup(records, name, plain[0]) or 0.0 for name in plain}
    return max(speeds, key=lambda name: speeds[name])


def summarise(
    records: Sequence[Record],
    methods: Sequence[str],
    sets: Sequence[str],
    temperatures: Sequence[float],
    base: str,
    plain_of: Mapping[str, str | None],
) -> list[Figures]:
    """Return the figures of every method that has answered, on every set and on their mean.

    Args:
        base: the plain vLLM whose speed is 1.
        plain_of: by method, the plain vLLM to compare with; None: there is none.
    """
    found: list[Figures] = []
    for temperature in temperatures:
        here = [record for record in records if record.temperature == temperature]
        for method in methods:
            ours = [record for record in here if method in record.answers]
            of_sets = [[record for record in ours if record.set == name] for name in sets]
            cells = [_figures(of, method, base, plain_of.get(method)) for of in of_sets if of]
            found += cells
            if len(cells) == len(sets):
                found.append(_mean(cells, here, base))
    return found


def _figures(records: Sequence[Record], method: str, base: str, plain: str | None) -> Figures:
    """Return the figures of one set and temperature; the method has answered all records."""
    answers, name = [record.answers[method] for record in records], records[0].set
    tokens, outputs, steps, wall, draft_ns, draft_steps = (
        sum(getattr(answer, field) for answer in answers)
        for field in ("tokens", "outputs", "steps", "wall", "draft_ns", "draft_steps")
    )
    compared = [
        one != other
        for record in records
        if plain is not None and plain in record.answers
        for ours, theirs in zip(record.answers[method].ids, record.answers[plain].ids, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return Figures(
        method=method,
        set=name,
        temperature=records[0].temperature,
        speedup=_speedup(records, method, base),
        speedup_spread=_spread(records, method, base, [name]),
        speedup_cpu=_speedup(records, method, base, "cpu"),
        throughput=tokens / wall,
        tau=acceptance_length(tokens, outputs, steps),
        draft_ms=draft_ns / draft_steps * 1e-6 if draft_steps else None,
        draft_share=draft_ns * 1e-9 / wall if draft_steps else None,
        tokens=tokens,
        outputs=outputs,
        different=sum(compared) if compared else None,
    )


def _mean(cells: Sequence[Figures], records: Sequence[Record], base: str) -> Figures:
    """Return the mean over the sets; the spread is that of the rounds' own means."""
    method, sets = cells[0].method, [cell.set for cell in cells]
    spread = _spread(records, method, base, sets)
    joined: dict[str, Any] = {"set": MEAN, "speedup_spread": spread}
    means = ("speedup", "speedup_cpu", "throughput", "tau", "draft_ms", "draft_share")
    for name in (*means, "tokens", "outputs", "different"):
        values = [getattr(cell, name) for cell in cells]
        join = fmean if name in means else sum
        joined[name] = None if None in values else join(values)
    return replace(cells[0], **joined)


def _speedup(
    records: Iterable[Record], method: str, base: str, cost: Literal["wall", "cpu"] = "wall"
) -> float | None:
    """Return the median cost of a token with `base` over `method`, where records have both."""

    def per_token(answer: Answer) -> float:
        return float(getattr(answer, cost)) / answer.tokens

    ratios = [
        per_token(record.answers[base]) / per_token(record.answers[method])
        for record in records
        if {base, method} <= record.answers.keys()
    ]
    return median(ratios) if ratios else None


def _spread(records: Sequence[Record], method: str, base: str, sets: Sequence[str]) -> Spread:
    """Return the lowest and highest round's speed-up, a mean over sets; None with one round."""
    means = []
    for number in {record.round for record in records}:
        of_sets = [[r for r in records if (r.round, r.set) == (number, name)] for name in sets]
        speeds = [_speedup(each, method, base) for each in of_sets]
        if None not in speeds:
            means.append(fmean(speed for speed in speeds if speed is not None))
    return (min(means), max(means)) if len(means) > 1 and method != base else None


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
