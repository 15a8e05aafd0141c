"""The figures as Markdown: Table 1 [SpecBlock]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_specblock.bench.summary import MEAN, Figures

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
    return "\n\n".join([*parts, caption(base, facts)]) + "\n"


def main_table(figures: Sequence[Figures], base: str) -> str:
    """Return a row per method, a group of columns per set, of one temperature."""
    sets = [*dict.fromkeys(each.set for each in figures if each.set != MEAN), MEAN]
    columns = [column for name in sets for column in (f"{name} Spd", "Φ", "τ", "T_D")]
    rows = [["method", *columns, "outputs that differ"]]
    for method in dict.fromkeys(each.method for each in figures):
        own = {each.set: each for each in figures if each.method == method}
        cells = [cell for name in sets for cell in _cells(own.get(name))]
        known = [each for each in own.values() if each.set != MEAN]
        different = [each.different for each in known if each.different is not None]
        outputs = sum(each.outputs for each in known)
        differ = f"{sum(different)} of {outputs}" if different else _NONE
        name = f"{method} (fastest plain)" if method == base else method
        rows.append([name, *cells, differ])
    return markdown_table(rows)


def _cells(each: Figures | None) -> list[str]:
    """Return Spd, Φ, τ and T_D."""
    if each is None:
        return [_NONE] * 4
    speed = _NONE if each.speedup is None else f"{each.speedup:.2f}"
    if each.speedup_spread is not None:
        speed += " ({:.2f}–{:.2f})".format(*each.speedup_spread)
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
