"""From what engines answered, and what it cost, to the figures of the table [SpecBlock, §4.1]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, quantiles
from typing import Any

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.store import Answer, Record
from vllm_specblock.engine.metrics.acceptance import acceptance_length

MEAN = "mean"
"""In the place of a set's name: the mean over all sets."""


@dataclass(frozen=True)
class Figures:
    """One method on one set at one temperature. None: not known.

    Attributes:
        speedup: Spd: how many times less wall time a token takes than with the quickest plain
            vLLM; the median over units.
        speedup_spread: from the lowest to the highest round's median; with one round, the middle
            half of all units. None for the quickest plain vLLM, which is 1.
        speedup_cpu: the same by CPU seconds.
        throughput: Φ, tokens/s of wall time.
        tau: τ, tokens emitted per decode step: `engine/metrics/acceptance.py`.
        tau_spread: from the lowest to the highest round's.
        draft_ms: T_D, milliseconds of the drafters' forwards per step without prompts.
        draft_share: the same time as a share of all wall time.
        tokens: generated, in all units.
        outputs: answers to questions; different: those that are not those of plain vLLM with the
            same model runner.
    """

    method: str
    set: str
    temperature: float
    units: int
    speedup: float | None
    speedup_spread: tuple[float, float] | None
    speedup_cpu: float | None
    throughput: float
    tau: float
    tau_spread: tuple[float, float] | None
    draft_ms: float | None
    draft_share: float | None
    tokens: int
    outputs: int
    different: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def quickest(records: Sequence[Record], plain: Sequence[str]) -> str:
    """The plain vLLM that takes the least wall time per token: the median of ratios between
    engines that took turns.

    Raises:
        BenchError: nothing was answered.
    """
    if not any(plain[0] in record.answers for record in records):
        raise BenchError("There is no answer of plain vLLM to compare with.")

    def speed(name: str) -> float:
        ratios = [ratio for _, ratio in _ratios(records, name, plain[0], _wall)]
        return median(ratios) if ratios else 0.0

    return max(plain, key=speed)


def summarise(
    records: Sequence[Record],
    methods: Sequence[str],
    sets: Sequence[str],
    temperatures: Sequence[float],
    base: str,
    plain_of: Mapping[str, str | None],
) -> list[Figures]:
    """The figures of every method that has answered, on every set and on their mean.

    Args:
        base: the plain vLLM whose speed is 1.
        plain_of: by method, the plain vLLM whose outputs it should have; None: there is none.
    """
    found = []
    for temperature in temperatures:
        for method in methods:
            cells = []
            for name in sets:
                ours = [
                    record
                    for record in records
                    if (record.set, record.temperature) == (name, temperature)
                    and method in record.answers
                ]
                if ours:
                    cells.append(_figures(ours, method, base, plain_of.get(method)))
            found += cells
            if len(cells) == len(sets):
                found.append(
                    _mean(cells, [r for r in records if r.temperature == temperature], base)
                )
    return found


def _figures(records: Sequence[Record], method: str, base: str, plain: str | None) -> Figures:
    """Of records of one set and temperature, all of which the method has answered."""
    answers = [record.answers[method] for record in records]
    ratios = _ratios(records, method, base, _wall)
    cpu = [ratio for _, ratio in _ratios(records, method, base, _cpu)]
    wall, tokens = sum(each.wall for each in answers), sum(each.tokens for each in answers)
    nanoseconds, steps = (sum(x) for x in zip(*((a.draft_ns, a.draft_steps) for a in answers)))
    compared = [
        (record.answers[method].digests, record.answers[plain].digests)
        for record in records
        if plain is not None and plain in record.answers
    ]
    different = sum(
        one != other for ours, theirs in compared for one, other in zip(ours, theirs, strict=True)
    )
    return Figures(
        method=method,
        set=records[0].set,
        temperature=records[0].temperature,
        units=len(records),
        speedup=median(ratio for _, ratio in ratios) if ratios else None,
        speedup_spread=None if method == base else _spread(ratios),
        speedup_cpu=median(cpu) if cpu else None,
        throughput=tokens / wall,
        tau=_tau(answers),
        tau_spread=_range(
            _by_round(records, lambda those: _tau([r.answers[method] for r in those]))
        ),
        draft_ms=nanoseconds / steps * 1e-6 if steps else None,
        draft_share=nanoseconds * 1e-9 / wall if steps else None,
        tokens=tokens,
        outputs=sum(len(each.digests) for each in answers),
        different=different if compared else None,
    )


def _mean(cells: Sequence[Figures], records: Sequence[Record], base: str) -> Figures:
    """Over the sets; the spread is that of the rounds' own means."""
    method, sets = cells[0].method, [cell.set for cell in cells]

    def of_round(those: Sequence[Record]) -> float | None:
        medians = []
        for name in sets:
            ratios = _ratios([r for r in those if r.set == name], method, base, _wall)
            if not ratios:
                return None
            medians.append(median(ratio for _, ratio in ratios))
        return fmean(medians)

    def mean(name: str) -> float | None:
        values = [getattr(cell, name) for cell in cells]
        return None if None in values else fmean(values)

    different = [cell.different for cell in cells if cell.different is not None]
    return Figures(
        method=method,
        set=MEAN,
        temperature=cells[0].temperature,
        units=sum(cell.units for cell in cells),
        speedup=mean("speedup"),
        speedup_spread=None if method == base else _range(_by_round(records, of_round)),
        speedup_cpu=mean("speedup_cpu"),
        throughput=fmean(cell.throughput for cell in cells),
        tau=fmean(cell.tau for cell in cells),
        tau_spread=None,
        draft_ms=mean("draft_ms"),
        draft_share=mean("draft_share"),
        tokens=sum(cell.tokens for cell in cells),
        outputs=sum(cell.outputs for cell in cells),
        different=sum(different) if len(different) == len(cells) else None,
    )


def _wall(answer: Answer) -> float:
    return answer.wall / answer.tokens


def _cpu(answer: Answer) -> float:
    return answer.cpu / answer.tokens


def _ratios(
    records: Iterable[Record], method: str, base: str, cost: Callable[[Answer], float]
) -> list[tuple[int, float]]:
    """(round, how many times more a token costs with `base`) of each record that has both."""
    return [
        (record.round, cost(record.answers[base]) / cost(record.answers[method]))
        for record in records
        if base in record.answers and method in record.answers
    ]


def _tau(answers: Iterable[Answer]) -> float:
    counts = ((each.tokens, len(each.digests), each.steps) for each in answers)
    return acceptance_length(*(sum(count) for count in zip(*counts)))


def _by_round(records: Iterable[Record], figure: Callable[[list[Record]], Any]) -> list[Any]:
    """`figure` of every round's records."""
    rounds: dict[int, list[Record]] = {}
    for record in records:
        rounds.setdefault(record.round, []).append(record)
    return [figure(those) for those in rounds.values()]


def _range(values: Iterable[float | None]) -> tuple[float, float] | None:
    """From the lowest to the highest; None with fewer than two."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if len(known) > 1 else None


def _spread(ratios: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Of the rounds' medians; with one round, of the middle half of at least four units."""
    rounds: dict[int, list[float]] = {}
    for number, ratio in ratios:
        rounds.setdefault(number, []).append(ratio)
    if len(rounds) > 1:
        return _range(map(median, rounds.values()))
    if len(ratios) < 4:
        return None
    low, _, high = quantiles((ratio for _, ratio in ratios), n=4, method="inclusive")
    return low, high
