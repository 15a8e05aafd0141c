"""Figures of all answers [SpecBlock, §4.1]: OUT/table.md (Table 1) and OUT/results.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.store import Answer, Record
from vllm_specblock.engine.metrics.acceptance import REQUESTS, STEPS, TOKENS, acceptance_length
from vllm_specblock.train.data.shards import write_text

if TYPE_CHECKING:
    from vllm_specblock.bench.run import Bench

RESULTS, TABLE = "results.json", "table.md"
_NONE = "–"
MEAN = "mean"
"""In place of a set's name: the mean over all sets."""


@dataclass(frozen=True)
class Figures:
    """One method on one set at one temperature. None: not known.

    Attributes:
        speedup: Spd: speed over the fastest plain vLLM by wall time, median over units.
        speedup_rounds: the same of each round; none for the fastest plain vLLM, which is 1.
        speedup_cpu: the same by CPU seconds.
        throughput: Φ, tokens/s of wall time.
        tau: τ, tokens emitted per decode step: `engine/metrics/acceptance.py`.
        draft_ms: T_D, milliseconds of the drafters' forwards per step without prompts.
        tokens: generated, in all units.
        outputs: answers; different: answers unlike plain vLLM's with the same model runner.
    """

    method: str
    set: str
    temperature: float
    speedup: float | None
    speedup_rounds: list[float]
    speedup_cpu: float | None
    throughput: float
    tau: float
    draft_ms: float | None
    tokens: int
    outputs: int
    different: int | None


def write_results(bench: Bench) -> tuple[str, list[Path]]:
    """Write all files; return the page of `table.md`, and the paths.

    Raises BenchError if nothing was answered.
    """
    figures, base = figures_of(bench)
    out, head = bench.config.out, bench.store.head
    parts = [f"# {head['settings']['target']}: speed-up over plain vLLM"]
    for temperature in dict.fromkeys(each.temperature for each in figures):
        those = [each for each in figures if each.temperature == temperature]
        parts += [f"## T = {temperature:g}", main_table(those, base)]
    parts += caption(bench, base)
    text = "\n\n".join(parts) + "\n"
    whole = {"fastest_plain": base, "rounds": bench.config.rounds, "failures": bench.failures}
    whole |= {"figures": [asdict(each) for each in figures], **head}
    write_text(out / RESULTS, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    write_text(out / TABLE, text)
    return text, [out / RESULTS, out / TABLE]


def figures_of(bench: Bench) -> tuple[list[Figures], str]:
    """Return the figures of the chosen methods and sets, and the fastest plain vLLM's name.

    Raises BenchError if nothing was answered.
    """
    records, first = bench.store.records, bench.plain[0]
    if not any(first in record.answers for record in records):
        raise BenchError("There is no answer of plain vLLM to compare with.")
    speeds = {name: _speedup(records, name, first) or 0.0 for name in bench.plain}
    base = max(speeds, key=lambda name: speeds[name])
    return summarise(bench, records, base), base


def summarise(bench: Bench, records: Sequence[Record], base: str) -> list[Figures]:
    """Return the figures of every method that has answered, on every set and on their mean.

    `base` is the plain vLLM whose speed is 1.
    """
    found: list[Figures] = []
    plain_of = _plain_of(bench)
    for temperature in dict.fromkeys(bench.config.temperature):
        here = [record for record in records if record.unit.temperature == temperature]
        for method in bench.methods:
            ours = [record for record in here if method in record.answers]
            of_sets = [[each for each in ours if each.unit.set == name] for name in bench.sets]
            cells = [_figures(of, method, base, plain_of.get(method)) for of in of_sets if of]
            found += cells
            if len(cells) == len(bench.sets):
                found.append(_mean(cells))
    return found


def _plain_of(bench: Bench) -> dict[str, str | None]:
    """Return, by method, the plain vLLM with the same runner and dtype; None: there is none."""
    known = bench.store.head["engines"].items()
    arithmetic = {name: (facts["runner"], facts["dtype"]) for name, facts in known}
    plain = {arithmetic[name]: name for name in reversed(bench.plain) if name in arithmetic}
    return {name: plain.get(way) for name, way in arithmetic.items() if name not in bench.plain}


def _figures(records: Sequence[Record], method: str, base: str, plain: str | None) -> Figures:
    """Return the figures of one set and temperature; the method has answered all records."""
    answers, unit = [record.answers[method] for record in records], records[0].unit
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
    numbers = sorted({record.unit.round for record in records}) if method != base else []
    of_rounds = ([each for each in records if each.unit.round == number] for number in numbers)
    rounds = [_speedup(each, method, base) for each in of_rounds]
    return Figures(
        method=method,
        set=unit.set,
        temperature=unit.temperature,
        speedup=_speedup(records, method, base),
        speedup_rounds=[each for each in rounds if each is not None],
        speedup_cpu=_speedup(records, method, base, "cpu"),
        throughput=tokens / wall,
        tau=acceptance_length({TOKENS: tokens, REQUESTS: outputs, STEPS: steps}),
        draft_ms=draft_ns / draft_steps * 1e-6 if draft_steps else None,
        tokens=tokens,
        outputs=outputs,
        different=sum(compared) if compared else None,
    )


def _mean(cells: Sequence[Figures]) -> Figures:
    """Return the mean over the sets."""
    rounds = [fmean(of_sets) for of_sets in zip(*(cell.speedup_rounds for cell in cells))]
    joined: dict[str, Any] = {"set": MEAN, "speedup_rounds": rounds}
    means = ("speedup", "speedup_cpu", "throughput", "tau", "draft_ms")
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


def main_table(figures: Sequence[Figures], base: str) -> str:
    """Return a row per method, a group of columns per set, of one temperature."""
    sets = [*dict.fromkeys(each.set for each in figures if each.set != MEAN), MEAN]
    columns = [column for name in sets for column in (f"{name} Spd", "Φ", "τ", "T_D")]
    rows = [["method", *columns, "outputs that differ"]]
    for method in dict.fromkeys(each.method for each in figures):
        own = {each.set: each for each in figures if each.method == method}
        cells = [cell for name in sets for cell in _cells(own.get(name))]
        known = [each for each in own.values() if each.set != MEAN and each.different is not None]
        different = sum(each.different or 0 for each in known)
        differ = f"{different} of {sum(each.outputs for each in known)}" if known else _NONE
        name = f"{method} (fastest plain)" if method == base else method
        rows.append([name, *cells, differ])
    return markdown_table(rows)


def _cells(each: Figures | None) -> list[str]:
    """Return Spd, Φ, τ and T_D."""
    if each is None:
        return [_NONE] * 4
    speed = _NONE if each.speedup is None else f"{each.speedup:.2f}"
    if len(each.speedup_rounds) > 1:
        speed += f" ({min(each.speedup_rounds):.2f}–{max(each.speedup_rounds):.2f})"
    drafting = _NONE if each.draft_ms is None else f"{each.draft_ms:.2f}"
    return [speed, f"{each.throughput:.1f}", f"{each.tau:.2f}", drafting]


def caption(bench: Bench, base: str) -> list[str]:
    """Explain the columns, and say what was measured, with which commands."""
    config, head = bench.config, bench.store.head
    settings, machine = head["settings"], head["settings"]["machine"]
    ways = defaultdict[str, list[str]](list)
    for name in bench.methods:
        if facts := head["engines"].get(name):
            ways["runner {runner}, {compiled}, {dtype}".format(**facts)].append(name)
    measured = [
        machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores",
        f"batch {config.batch}",
        "questions: " + ", ".join(f"{name} {len(asked)}" for name, asked in bench.sets.items()),
        "engines: " + "; ".join(f"{', '.join(names)} ({way})" for way, names in ways.items()),
        ", ".join(f"{name} {version}" for name, version in settings["versions"].items()),
        f"revision {settings['revision']}",
    ]
    parts = [
        f"Spd: speed of a token over that of {base}, the fastest plain vLLM of "
        f"{', '.join(bench.plain)} (median over questions; in brackets the lowest and highest "
        "round's). Engines run side by side and take turns. Φ: tokens/s. τ: tokens emitted per "
        "decode step of a question. T_D: milliseconds of the drafters' forwards per step without "
        "prompts. Outputs are compared with plain vLLM's of the same model runner.",
        f"Measured on {'; '.join(measured)}.",
        *bench.failures.values(),
    ]
    return [*parts, "\n".join(f"    {command}" for command in head["commands"])]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
