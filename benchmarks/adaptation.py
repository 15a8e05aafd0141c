"""Adaptation while serving, simulated on the example pair: every stream with every policy.

    python benchmarks/adaptation.py [--help]

The drafter knows code; tables are the other domain (`examples/two_heads/README.md` makes both
files of prompts). Nothing is served: see `specblock adapt simulate --help`. A seed's figures are
kept in a folder of its own, and one that is there already is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from lib.results_store import ROOT, markdown_table

from vllm_specblock.adapt.policy.registry import POLICIES
from vllm_specblock.adapt.streams import STREAMS
from vllm_specblock.cli.adapt import simulate

FOLDER = ROOT / "runs/two_heads"


def table(seeds: Sequence[dict[str, Any]]) -> str:
    """A row per stream and policy: means over the seeds, and for tokens/s their range.

    seeds: `results` of simulation.json, one per seed, all of the same streams and policies.
    """
    rows = [["stream", "policy", "τ", "tokens/s", "× frozen", "training", "swaps", "returns"]]
    for stream, policies in seeds[0].items():
        for policy in policies:
            found = [seed[stream][policy] for seed in seeds]
            speeds = [each["tokens_per_second"] for each in found]
            base = [seed[stream].get("frozen", {}).get("tokens_per_second") for seed in seeds]
            times = [speed / other for speed, other in zip(speeds, base) if other]
            rows.append(
                [
                    *(stream, policy, f"{fmean(each['tau'] for each in found):.3f}"),
                    f"{fmean(speeds):.1f} ({min(speeds):.1f} – {max(speeds):.1f})",
                    f"{fmean(times):.3f}" if times else "–",
                    f"{100 * fmean(each['training_share'] for each in found):.1f} %",
                    f"{fmean(each['swaps'] for each in found):.1f}",
                    f"{fmean(len(each['returns']) for each in found):.1f}",
                ]
            )
    return markdown_table(rows)


def main(
    drafter: Annotated[Path, typer.Option(help="That knows home.")] = ROOT
    / "examples/two_heads/code",
    target: Annotated[Path, typer.Option(help="Its target.")] = ROOT / "examples/tiny_pair/target",
    home: Annotated[Path, typer.Option(help="Prompts of code.")] = FOLDER / "code.jsonl",
    away: Annotated[Path, typer.Option(help="Prompts of tables.")] = FOLDER / "tables.jsonl",
    stream: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    requests: Annotated[int, typer.Option(help="Of each stream.")] = 768,
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on.")] = 3,
    lr: Annotated[float, typer.Option(help="The same for every policy.")] = 5e-4,
    update_seconds: Annotated[str, typer.Option(help="Heads, full.")] = "0.1,0.2",
    out: Annotated[Path, typer.Option(help="Folder.")] = ROOT / "runs/adaptation",
) -> None:
    """Simulate, and print one table over all seeds."""
    found = []
    for seed in range(seeds):
        folder = out / f"seed{seed}"
        if not (folder / "simulation.md").exists():  # written last
            simulate(
                drafter,
                home,
                away,
                folder,
                target=target,
                stream=stream or list(STREAMS),
                policy=policy or list(POLICIES),
                requests=requests,
                held_out=24,
                lr=lr,
                update_seconds=update_seconds,
                seed=seed,
            )
        found.append(json.loads((folder / "simulation.json").read_text())["results"])
    print(table(found))


if __name__ == "__main__":
    typer.run(main)
