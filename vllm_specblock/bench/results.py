"""OUT/table.md (Table 1 [SpecBlock]) and OUT/results.json, from everything in the store."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_specblock.bench.run import Bench
from vllm_specblock.bench.summary import MEAN, Figures, fastest, markdown_table, summarise
from vllm_specblock.train.data.shards import write_text

RESULTS, TABLE = "results.json", "table.md"
_NONE = "–"


def write_results(bench: Bench) -> tuple[str, list[Path]]:
    """Write all files; return the page of `table.md`, and the paths.

    Raises:
        BenchError: nothing was answered.
    """
    figures, base = figures_of(bench)
    config, head = bench.config, bench.store.head
    parts = [f"# {head['settings']['target']['name']}: speed-up over plain vLLM"]
    for temperature in dict.fromkeys(each.temperature for each in figures):
        those = [each for each in figures if each.temperature == temperature]
        parts += [f"## T = {temperature:g}", main_table(those, base)]
    parts += caption(bench, base)
    text = "\n\n".join(parts) + "\n"
    whole = {"fastest_plain": base, "rounds": config.rounds, "failures": bench.failures}
    whole |= {"figures": [asdict(each) for each in figures], **head}
    out = config.out
    write_text(out / RESULTS, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    write_text(out / TABLE, text)
    return text, [out / RESULTS, out / TABLE]


def figures_of(bench: Bench) -> tuple[list[Figures], str]:
    """Return the figures of the chosen methods and sets, and the fastest plain vLLM's name."""
    config = bench.config
    records = [each for each in bench.store.records if each.round < config.rounds]
    base = fastest(records, bench.plain)
    asked = [*bench.methods], [*bench.sets], config.temperature
    return summarise(records, *asked, base, plain_of(bench)), base


def plain_of(bench: Bench) -> dict[str, str | None]:
    """Return, by method, the plain vLLM with the same runner and dtype; None: there is none."""
    known = bench.store.head["engines"].items()
    arithmetic = {name: (facts["runner"], facts["dtype"]) for name, facts in known}
    plain = {arithmetic[name]: name for name in reversed(bench.plain) if name in arithmetic}
    others = [name for name in bench.methods if name not in bench.plain]
    return {name: plain.get(arithmetic[name]) if name in arithmetic else None for name in others}


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
        f"at most {config.max_new_tokens} new tokens",
        "questions: " + ", ".join(f"{name} {len(asked)}" for name, asked in bench.sets.items()),
        f"rounds: {config.rounds}",
        "engines: " + "; ".join(f"{', '.join(names)} ({way})" for way, names in ways.items()),
        ", ".join(f"{name} {version}" for name, version in settings["versions"].items()),
        f"revision {settings['revision']}",
    ]
    parts = [
        f"Spd: speed of a token over that of {base}, the fastest plain vLLM of "
        f"{', '.join(bench.plain)} (median over questions; in brackets the lowest and highest "
        "round's). Engines run side by side and take turns. Φ: tokens/s. τ: tokens emitted per "
        "decode step of a question. T_D: milliseconds of the drafters' forwards per step without "
        "prompts, and their share of all time. Outputs are compared with plain vLLM's of the same "
        "model runner.",
        f"Measured on {'; '.join(measured)}.",
        *bench.failures.values(),
    ]
    return [*parts, "\n".join(f"    {command}" for command in head["commands"])]
