"""OUT/results.json, OUT/table.md and the plots, made anew from all that is in the store."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from vllm_specblock.bench import near_ties, plots
from vllm_specblock.bench.near_ties import differences
from vllm_specblock.bench.run import Bench
from vllm_specblock.bench.summary import Figures, quickest, summarise
from vllm_specblock.bench.table import page
from vllm_specblock.train.data.shards import replace

RESULTS, TABLE = "results.json", "table.md"


def write_results(bench: Bench) -> tuple[str, list[Path]]:
    """Write all files.

    Returns:
        the page of `table.md`, and what was written.

    Raises:
        BenchError: nothing was answered.
    """
    figures, base = figures_of(bench)
    facts = facts_of(bench)
    text = page(figures, base, facts)
    found = []
    if bench.config.explain:
        found = differences(bench, plain_of(bench))
    if found:
        said, ties = near_ties.page(bench.config.target, found)
        facts |= {"near_ties": ties}
        text += f"\n## Greedy answers that are not plain vLLM's\n\n{said}\n"
    whole = {"quickest_plain": base, **facts, "figures": [each.as_json() for each in figures]}
    whole |= {
        "settings": bench.store.head["settings"],
        "provenance": bench.store.head["provenance"],
    }
    out = bench.config.out
    contents = {
        out / RESULTS: json.dumps(whole, indent=1, ensure_ascii=False) + "\n",
        out / TABLE: text,
    }
    for path, content in contents.items():
        replace(path, partial(Path.write_text, data=content, encoding="utf-8"))
    return text, [*contents, *plots.draw(figures, base, out)]


def figures_of(bench: Bench) -> tuple[list[Figures], str]:
    """The figures of what is chosen now, and the quickest plain vLLM's name."""
    config, methods = bench.config, bench.methods
    records = [each for each in bench.store.records if each.round < config.rounds]
    base = quickest(records, [method.name for method in methods.values() if method.plain])
    sets, heats = [*bench.sets], [*config.temperature]
    return summarise(records, [*methods], sets, heats, base, plain_of(bench)), base


def plain_of(bench: Bench) -> dict[str, str | None]:
    """By method, the plain vLLM whose outputs it should have; None: there is none."""
    plain = [method.name for method in bench.methods.values() if method.plain]
    engines = bench.store.head["engines"]
    return {
        name: next(
            (
                other
                for other in plain
                if other != name and _same_arithmetic(engines.get(name), engines.get(other))
            ),
            None,
        )
        for name in bench.methods
        if name not in plain
    }


def _same_arithmetic(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two engines should give the same tokens."""
    return (
        one is not None
        and other is not None
        and all(one[key] == other[key] for key in ("runner", "dtype"))
    )


def facts_of(bench: Bench) -> dict[str, Any]:
    """What the figures hold for, in JSON's types."""
    config, head = bench.config, bench.store.head
    engines = {name: head["engines"][name] for name in bench.methods if name in head["engines"]}
    ways: dict[str, list[str]] = {}
    for name, facts in engines.items():
        ways.setdefault(f"runner {facts['runner']}, {facts['compiled']}", []).append(name)
    versions = head["provenance"]["versions"]
    return {
        "target": head["settings"]["target"]["name"],
        "machine": head["settings"]["machine"],
        "dtype": ", ".join(dict.fromkeys(facts["dtype"] for facts in engines.values())),
        "plain": [method.name for method in bench.methods.values() if method.plain],
        "engines": "; ".join(f"{', '.join(names)} ({way})" for way, names in ways.items()),
        "batch": config.batch,
        "max_new_tokens": config.max_new_tokens,
        "questions": "questions: "
        + ", ".join(f"{name} {len(questions)}" for name, questions in bench.sets.items()),
        "rounds": config.rounds,
        "seed": config.seed,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "revision": head["revision"],
        "commands": head["commands"],
        "failures": bench.failures,
    }
