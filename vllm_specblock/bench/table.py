"""The figures as Markdown: Table 1 [SpecBlock], then all else that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_specblock.bench.summary import MEAN, Figures

COLUMNS = ("Spd", "Φ", "τ", "T_D")
_NONE = "–"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Results to be read; the first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(figures: Sequence[Figures], base: str, facts: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        base: the plain vLLM whose speed is 1.
        facts: see `results.facts_of`.
    """
    parts = [f"# {facts['target']}: speed-up over plain vLLM"]
    temperatures = [*dict.fromkeys(each.temperature for each in figures)]
    for temperature in temperatures:
        those = [each for each in figures if each.temperature == temperature]
        parts += [f"## T = {temperature:g}", main_table(those, base)]
    parts += [caption(base, facts), "## Every set", details(figures)]
    return "\n\n".join(parts) + "\n"


def main_table(figures: Sequence[Figures], base: str) -> str:
    """A row per method, a group of columns per set, of one temperature."""
    methods = [*dict.fromkeys(each.method for each in figures)]
    sets = [*dict.fromkeys(each.set for each in figures if each.set != MEAN), MEAN]
    by_place = {(each.method, each.set): each for each in figures}
    head = ["method"]
    for name in sets:
        head += [f"{name} {COLUMNS[0]}", *COLUMNS[1:]]
    rows = [head]
    for method in methods:
        row = [f"{method} (quickest plain)" if method == base else method]
        for name in sets:
            row += _cells(by_place.get((method, name)))
        rows.append(row)
    return markdown_table(rows)


def _cells(each: Figures | None) -> list[str]:
    if each is None:
        return [_NONE] * len(COLUMNS)
    return [
        _times(each.speedup, each.speedup_spread),
        f"{each.throughput:.1f}",
        f"{each.tau:.2f}",
        _drafting(each),
    ]


def details(figures: Sequence[Figures]) -> str:
    """A row per method, set and temperature."""
    rows = [
        [
            "set",
            "T",
            "method",
            "Spd",
            "Spd per CPU second",
            "Φ",
            "τ",
            "T_D",
            "tokens",
            "outputs that differ",
        ]
    ]
    for each in sorted(figures, key=_place(figures)):
        differ = _NONE if each.different is None else f"{each.different} of {each.outputs}"
        tau = f"{each.tau:.2f}" + (_between(each.tau_spread) if each.tau > 1 else "")
        rows.append(
            [
                each.set,
                f"{each.temperature:g}",
                each.method,
                _times(each.speedup, each.speedup_spread),
                _times(each.speedup_cpu),
                f"{each.throughput:.1f}",
                tau,
                _drafting(each),
                f"{each.tokens:,}",
                differ,
            ]
        )
    return markdown_table(rows)


def _place(figures: Sequence[Figures]) -> Callable[[Figures], tuple[int, float]]:
    sets = [*dict.fromkeys(each.set for each in figures if each.set != MEAN), MEAN]
    return lambda each: (sets.index(each.set), each.temperature)


def caption(base: str, facts: Mapping[str, Any]) -> str:
    """What the columns are, and what the figures hold for."""
    machine, rounds = facts["machine"], facts["rounds"]
    spread = (
        "in brackets the lowest and the highest round's median"
        if rounds > 1
        else "in brackets the middle half of all turns"
    )
    cores = f"{machine['cpu']}, {machine['cores']} cores"
    lines = [
        f"Spd: how many times quicker a token comes than from {base}, the quickest plain vLLM of "
        f"{', '.join(facts['plain'])} (median over turns, {spread}). Engines are alive side by "
        "side and take turns. Φ: tokens/s. τ: tokens emitted per decode step of a question. "
        "T_D: milliseconds of the drafters' forwards per step without prompts, and their share of "
        "all time. Outputs are compared with plain vLLM's of the same model runner.",
        f"Measured on {machine['gpu'] or cores}; {facts['dtype']}; batch {facts['batch']}; at most "
        f"{facts['max_new_tokens']} new tokens; {facts['questions']}; rounds: {rounds}; seed "
        f"{facts['seed']}; engines: {facts['engines']}; {facts['versions']}; revision "
        f"{facts['revision']}.",
        "\n".join(f"    {command}" for command in facts["commands"]),
    ]
    if facts["failures"]:
        lines.insert(2, "Not measured: " + " ".join(facts["failures"].values()))
    return "\n\n".join(lines)


def _times(value: float | None, spread: tuple[float, float] | None = None) -> str:
    return _NONE if value is None else f"{value:.2f}{_between(spread)}"


def _between(spread: tuple[float, float] | None) -> str:
    return "" if spread is None else f" ({spread[0]:.2f}–{spread[1]:.2f})"


def _drafting(each: Figures) -> str:
    if each.draft_ms is None or each.draft_share is None:
        return _NONE
    return f"{each.draft_ms:.2f} ({each.draft_share:.0%})"
