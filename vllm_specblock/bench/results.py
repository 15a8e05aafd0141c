"""OUT/results.json and OUT/table.md, written again from everything in the store."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_specblock.bench import near_ties
from vllm_specblock.bench.run import Bench
from vllm_specblock.bench.summary import Figures, fastest, summarise
from vllm_specblock.bench.table import page
from vllm_specblock.train.data.shards import write_text

RESULTS, TABLE = "results.json", "table.md"


def write_results(bench: Bench) -> tuple[str, list[Path]]:
    """Write all files; return the page of `table.md`, and the paths.

    Raises:
        BenchError: nothing was answered.
    """
    figures, base = figures_of(bench)
    facts = facts_of(bench)
    text = page(figures, base, facts)
    found = near_ties.differences(bench, plain_of(bench)) if bench.config.explain else {}
    if found:
        said, ties = near_ties.page(bench.config.target, found)
        facts |= {"near_ties": ties}
        text += f"\n## Greedy answers that differ from plain vLLM's\n\n{said}\n"
    whole = {"quickest_plain": base, **facts, "figures": [asdict(each) for each in figures]}
    whole |= {key: bench.store.head[key] for key in ("settings", "provenance")}
    out = bench.config.out
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


def facts_of(bench: Bench) -> dict[str, Any]:
    """Return what was measured and how, as JSON types."""
    config, head = bench.config, bench.store.head
    engines = {name: head["engines"][name] for name in bench.methods if name in head["engines"]}
    ways = defaultdict[str, list[str]](list)
    for name, facts in engines.items():
        ways[f"runner {facts['runner']}, {facts['compiled']}"].append(name)
    versions = head["provenance"]["versions"]
    sizes = ", ".join(f"{name} {len(questions)}" for name, questions in bench.sets.items())
    return {
        "target": head["settings"]["target"]["name"],
        "machine": head["settings"]["machine"],
        "dtype": ", ".join(dict.fromkeys(facts["dtype"] for facts in engines.values())),
        "plain": bench.plain,
        "engines": "; ".join(f"{', '.join(names)} ({way})" for way, names in ways.items()),
        "questions": f"questions: {sizes}",
        **{key: getattr(config, key) for key in ("batch", "max_new_tokens", "rounds", "seed")},
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "revision": head["revision"],
        "commands": head["commands"],
        "failures": bench.failures,
    }
