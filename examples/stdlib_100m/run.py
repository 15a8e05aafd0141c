"""The controlled comparison on one GPU, in calls of a few minutes; repeat until it is done.

    python examples/stdlib_100m/run.py

Each call resumes the last one: target and answers first, then the comparison for each seed, then
the table over all seeds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "tiny_pair" / "build.py"
COMPARISON = HERE.parents[1] / "research" / "comparison.py"
SHORTEST = 0.5  # minutes; starting a program for less would be all that it does


def run(
    work: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("runs/stdlib_100m"),
    recipe: Annotated[Path, typer.Option(help="Of the comparison.")] = HERE / "comparison.yaml",
    seeds: Annotated[str, typer.Option(help="With commas between them.")] = "0,1,2",
    minutes: Annotated[
        float, typer.Option(help="Of this call; loading and the last piece come on top.")
    ] = 8,
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")] = "cuda",
    size: Annotated[str, typer.Option(help="Of the pair, see tiny_pair/sizes.py.")] = "100m",
) -> None:
    """Run the next `minutes` of the comparison."""
    end = time.monotonic() + 60 * minutes

    def call(program: Path, *options: object, makes: Path) -> None:
        """Run `program` until its last file exists, or end this call when its time is over."""
        if makes.exists():
            return
        left = (end - time.monotonic()) / 60
        if left > SHORTEST:
            options = (*options, "--device", device, "--minutes", f"{left:.2f}")
            subprocess.run([sys.executable, program, *map(str, options)], check=True)
        if not makes.exists():
            typer.echo(f"{makes} is not made yet: call again to resume.")
            raise typer.Exit()

    prompts = work / "prompts.jsonl"
    building = ("--size", size, "--work", work, "--no-drafter", "--held-out-prompts", 40)
    call(BUILD, *building, makes=prompts)
    summaries = []
    for seed in seeds.split(","):
        out = work / "comparison" / f"seed-{seed.strip()}"
        paths = ("--target", work / "target", "--data", work / "drafter_data.safetensors")
        paths += ("--prompts", prompts, "--out", out)
        call(COMPARISON, recipe, *paths, "--seed", seed.strip(), makes=out / "comparison.json")
        summaries.append(json.loads((out / "comparison.json").read_text(encoding="utf-8")))
    text = table(summaries)
    (work / "results.md").write_text(text + "\n", encoding="utf-8")
    typer.echo(f"{text}\n\nAll is done; the table is in {work / 'results.md'}.")


def table(summaries: list[dict]) -> str:
    """τ of every drafter in Markdown: mean over the seeds ± their standard deviation.

    With one seed, ± is the standard error over its steps.
    """
    lines = [f"| drafter, {len(summaries)} seeds | τ, T=0 | τ, T=1 |", "| --- | --- | --- |"]
    names = dict.fromkeys(key.rpartition(" T=")[0] for key in summaries[0]["results"])
    for name in names:
        cells = [
            _cell([s["results"][f"{name} T={sampling_temperature}"] for s in summaries])
            for sampling_temperature in (0, 1)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(results: list[dict]) -> str:
    taus = [result["tau"] for result in results]
    spread = statistics.stdev(taus) if len(taus) > 1 else results[0]["error"]
    return f"{statistics.mean(taus):.2f} ± {spread:.2f}"


if __name__ == "__main__":
    typer.run(run)
