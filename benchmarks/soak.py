"""Mixed traffic against `vllm serve`: answers held against plain vLLM's, and flat memory.

    python benchmarks/soak.py [--phase "whole trees"] [--minutes 60] [--requests 2000]

Two servers of the example pair in float32, one with SpecBlock's trees merged with n-gram ones, take
turns over windows of the same requests: chats and completions, streams, clients that leave, greedy
and seeded, penalties, grammars, long prompts in chunks, shared beginnings, several answers, wrong
requests; with a cache so small that requests are preempted. Each phase has servers of its own.
They take 6 GB.

Prints a line per window, and the first requests whose replies differ with both replies. Exit status
1 if anything differs, a server ends, a request stays in it, memory grows by more than 3 % after the
first quarter, or nothing was preempted, cut, found in the prefix cache or accepted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from lib.results_store import MEASURED, ResultsStore, markdown_table
from lib.soak_run import PHASES, Findings, run_phase


def report(name: str, found: Findings) -> None:
    """Print a line after a window of a phase."""
    drafts, memory = found.counters["drafts"], found.memory["drafts"][-1]
    print(
        f"{name}, window {found.windows}: {found.requests} requests, "
        f"{found.finished} finished, {found.cut} cut, "
        f"{found.refused} refused, {found.different} different; "
        f"{drafts['preemptions']} preemptions, "
        f"{drafts['accepted_nodes']} nodes accepted, "
        f"{memory['server']:.0f} + {memory['engine']:.0f} MiB",
        flush=True,
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    head = ["phase", "requests", "finished", "cut", "refused", "different", "tokens compared"]
    head += ["preemptions", "prefix hits", "nodes accepted", "memory", "wrong"]
    rows = [head]
    for name, each in results.items():
        counters, growth = each["counters"]["drafts"], each["drafts_memory_growth"]
        whole = ("requests", "finished", "cut", "refused", "different", "compared_tokens")
        rows.append(
            [
                name,
                *(f"{each[key]:,}" for key in whole),
                f"{counters['preemptions']:,}",
                f"{counters['prefix_hit_tokens'] / max(1, counters['prompt_tokens']):.0%}",
                f"{counters['accepted_nodes']:,}",
                "too short" if growth is None else f"{growth:+.1%}",
                str(len(each["wrong"])),
            ]
        )
    return markdown_table(rows)


def main(
    phase: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Of each phase, at least.")] = 60,
    requests: Annotated[int, typer.Option(min=1, help="Of each phase, at least.")] = 2_000,
    clients: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 16,
    window: Annotated[int, typer.Option(min=1, help="Requests of one turn.")] = 100,
    nodes: Annotated[int, typer.Option(min=1, help="Of a tree.")] = 16,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for soak.json and logs.")] = MEASURED / "soak",
) -> None:
    """Serve, ask, compare, print a table."""
    unknown = set(phase or ()) - set(PHASES)
    if unknown:
        raise typer.BadParameter(
            f"There is no phase {unknown.pop()!r}; there are {', '.join(PHASES)}."
        )
    settings = {"seed": seed, "clients": clients, "window": window, "nodes": nodes}
    store = ResultsStore(out / "soak.json", settings)

    def enough(found: Findings, seconds: float) -> bool:
        return seconds >= 60 * minutes and found.requests >= requests

    for name in phase or PHASES:

        def seen(found: Findings, name: str = name) -> None:
            report(name, found)
            store.add(name, found.as_json())

        folder = out / name.replace(" ", "_")
        found = run_phase(name, nodes, seed, clients, window, enough, folder, seen)
        store.add(name, found.as_json())
        for each in found.differences[:3]:
            print(json.dumps(each, indent=1, ensure_ascii=False))
    results = {name: store.results[name] for name in phase or PHASES}
    print(table(results))
    wrong = [f"{name}: {said}" for name, each in results.items() for said in each["wrong"]]
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
