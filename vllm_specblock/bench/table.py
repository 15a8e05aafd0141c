"""The figures as Markdown: Table 1 [SpecBlock], then everything else that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specblock.bench.summary import MEAN, Figures, Spread

_NONE = "–"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(figures: Sequence[Figures], base: str, facts: Mapping[str, Any]) -> str:
    """Return the whole page.

    Args:
        base: the plain vLLM whose speed is 1.
        facts: see `results.facts_of`.
    """
    parts = [f"# {facts['target']}: speed-up over plain vLLM"]
    for temperature in dict.fromkeys(each.temperature for each in figures):
        those = [each for each in figures if each.temperature == temperature]
        parts += [f"## T = {temperature:g}", main_table(those, base)]
    parts += [caption(base, facts), "## Every set", details(figures)]
    return "\n\n".join(parts) + "\n"


def _sets(figures: Sequence[Figures]) -> list[str]:
    return [*dict.fromkeys(each.set for each in figures if each.set != MEAN), MEAN]


def main_table(figures: Sequence[Figures], base: str) -> str:
    """Return a row per method, a group of columns per set, of one temperature."""
    cells = {(each.method, each.set): _cells(each) for each in figures}
    rows = [["method"]]
    for name in _sets(figures):
        rows[0] += [f"{name} Spd", "Φ", "τ", "T_D"]
    for method in dict.fromkeys(each.method for each in figures):
        row = [f"{method} (fastest plain)" if method == base else method]
        for name in _sets(figures):
            row += cells.get((method, name), [_NONE] * 4)
        rows.append(row)
    return markdown_table(rows)


def details(figures: Sequence[Figures]) -> str:
    """Return a row per method, set and temperature."""
    head = ["set", "T", "method", "Spd", "Spd per CPU second", "Φ", "τ", "T_D", "tokens"]
    rows = [[*head, "outputs that differ"]]
    sets = _sets(figures)
    for each in sorted(figures, key=lambda each: (sets.index(each.set), each.temperature)):
        speed, *others = _cells(each)
        row = [each.set, f"{each.temperature:g}", each.method, speed, _times(each.speedup_cpu)]
        differ = _NONE if each.different is None else f"{each.different} of {each.outputs}"
        rows.append([*row, *others, f"{each.tokens:,}", differ])
    return markdown_table(rows)


def _cells(each: Figures) -> list[str]:
    """Return Spd, Φ, τ and T_D."""
    speed = _times(each.speedup, each.speedup_spread)
    drafting = _NONE
    if each.draft_ms is not None and each.draft_share is not None:
        drafting = f"{each.draft_ms:.2f} ({each.draft_share:.0%})"
    return [speed, f"{each.throughput:.1f}", f"{each.tau:.2f}", drafting]


def caption(base: str, facts: Mapping[str, Any]) -> str:
    """Explain the columns, and list what was measured."""
    machine = facts["machine"]
    lines = [
        f"Spd: speed of a token over that of {base}, the fastest plain vLLM of "
        f"{', '.join(facts['plain'])} (median over questions; in brackets the lowest and highest "
        "round's). Engines run side by side and take turns. Φ: tokens/s. τ: tokens emitted per "
        "decode step of a question. T_D: milliseconds of the drafters' forwards per step without "
        "prompts, and their share of all time. Outputs are compared with plain vLLM's of the same "
        "model runner.",
        f"Measured on {machine['gpu'] or '{cpu}, {cores} cores'.format(**machine)}; "
        f"{facts['dtype']}; batch {facts['batch']}; at most {facts['max_new_tokens']} new tokens; "
        f"{facts['questions']}; rounds: {facts['rounds']}; seed {facts['seed']}; engines: "
        f"{facts['engines']}; {facts['versions']}; revision {facts['revision']}.",
    ]
    if facts["failures"]:
        lines.append("Not measured: " + " ".join(facts["failures"].values()))
    return "\n\n".join([*lines, "\n".join(f"    {command}" for command in facts["commands"])])


def _times(value: float | None, spread: Spread = None) -> str:
    between = "" if spread is None else f" ({spread[0]:.2f}–{spread[1]:.2f})"
    return _NONE if value is None else f"{value:.2f}{between}"
