"""The controller alone, on made-up machines and texts: regret against the best fixed choices.

    python benchmarks/controller.py [--only "plain is best;bursts"] [--seeds 3]

Regret counts from step 64. The best fixed choice of a phase is plain decoding, so many nodes of
each tree, or all nodes above a survival. No model runs; the whole table takes a few minutes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from lib.controller_world import MACHINES, Fixed, Machine, World, figures, simulate, traces
from lib.results_store import MEASURED, markdown_table

from vllm_specblock.train.provenance import provenance

BARS = {"regret": 0.03, "loss": 0.01, "first": 0.97, "back": 256}
POLICIES: dict[str, Callable[[Machine], Any]] = {
    "plain": lambda machine: Fixed(1.0),
    "all": lambda machine: Fixed(0.0),
    "threshold": lambda machine: Fixed(0.2),
}


def worst(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each figure's worst over seeds; the phases are the first seed's."""
    loss = [each["loss"] for each in found if each["loss"] is not None]
    back = [each["back"] for each in found if each["back"] is not None]
    return found[0] | {
        "regret": max(each["regret"] for each in found),
        "loss": max(loss, default=None),
        "first": min(each["first"] for each in found),
        "back": max(back, default=None),
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Return the figures that miss their bars."""
    return [
        name
        for name, bar in BARS.items()
        if result[name] is not None
        and (result[name] < bar if name == "first" else result[name] > bar)
    ]


def row(name: str, result: dict[str, Any]) -> list[str]:
    loss, back = result["loss"], result["back"]
    phases = result["phases"][:6]
    return [
        name,
        f"{result['regret']:.1%}",
        "–" if loss is None else f"{loss:.1%}",
        f"{result['first']:.2f}",
        "–" if back is None else str(back),
        f"{result['drafted']:.0%}",
        " ".join(f"{phase['seen']:.2f}/{phase['gain']:.2f}" for phase in phases),
        ", ".join(missed(result)),
    ]


def main(
    policy: Annotated[str, typer.Option(help=", ".join(POLICIES))] = "plain",
    only: Annotated[str | None, typer.Option(help="Parts of names, `;` between them.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="The worst of so many is shown.")] = 3,
    length: Annotated[int, typer.Option(min=256, help="Steps of a phase.")] = 3000,
    out: Annotated[Path, typer.Option(help="JSON of all figures.")] = MEASURED / "controller.json",
) -> None:
    """Print a row per trace and machine, and write all figures."""
    results: dict[str, Any] = {}
    table = [
        [
            "trace",
            "regret",
            "below plain",
            "first 400",
            "back",
            "drafted",
            "gain seen/best",
            "missed",
        ]
    ]
    began, steps = time.perf_counter(), 0
    for machine_name, machine in MACHINES.items():
        for trace_name, trace in traces(length).items():
            name = f"{machine_name}: {trace_name}"
            if only and not any(part.strip() in name for part in only.split(";")):
                continue
            found = []
            for seed in range(seeds):
                world = World(machine, trace, seed)
                found.append(figures(world, simulate(world, POLICIES[policy](machine))))
                steps += len(world.phase)
            results[name] = worst(found)
            table.append(row(name, results[name]))
    print(markdown_table(table))
    failed = sum(bool(missed(result)) for result in results.values())
    took = time.perf_counter() - began
    print(f"\n{failed} of {len(results)} miss a bar; {steps} steps, {steps / took:.0f} a second")
    settings = {"policy": policy, "seeds": seeds, "length": length}
    content = {"settings": settings, "provenance": provenance(), "bars": BARS, "results": results}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
