"""The controller alone, on simulated servers: regret against the best fixed choices.

    python benchmarks/controller.py [--only "plain is best;bursts"] [--seeds 3]

The best fixed choice of a phase is plain decoding, a number of nodes of each tree, or all nodes
above a survival. Regret counts from step 64. No model runs; the table takes a few minutes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from lib.controller_world import MACHINES, World, figures, simulate, traces
from lib.results_store import MEASURED, markdown_table, write_results

from vllm_specblock.feedback.controller import Controller
from vllm_specblock.train.provenance import provenance

BARS = {"regret": 0.03, "loss": 0.01, "first": 0.97, "back": 256}


def missed(result: dict[str, Any]) -> list[str]:
    over = {name: result[name] - bar for name, bar in BARS.items() if result[name] is not None}
    return [name for name, by in over.items() if (-by if name == "first" else by) > 0]


def worst(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each figure's worst over seeds; the phases are the first seed's."""
    result = dict(found[0])
    for name in BARS:
        values = [each[name] for each in found if each[name] is not None]
        result[name] = (min if name == "first" else max)(values, default=None)
    return result


def row(name: str, result: dict[str, Any]) -> list[str]:
    loss, back = result["loss"], result["back"]
    return [
        name,
        f"{result['regret']:.1%}",
        "–" if loss is None else f"{loss:.1%}",
        f"{result['first']:.2f}",
        "–" if back is None else str(back),
        f"{result['drafted']:.0%}",
        " ".join(f"{phase['seen']:.2f}/{phase['gain']:.2f}" for phase in result["phases"][:6]),
        ", ".join(missed(result)),
    ]


def main(
    only: Annotated[str, typer.Option(help="Parts of names, `;` between them.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="The table has the worst of them.")] = 3,
    length: Annotated[int, typer.Option(min=256, help="Steps of a phase.")] = 3000,
    out: Annotated[Path, typer.Option(help="JSON of all figures.")] = MEASURED / "controller.json",
) -> None:
    """Print a row per trace and machine, and write all figures."""
    results: dict[str, Any] = {}
    began, steps = time.perf_counter(), 0
    for machine_name, machine in MACHINES.items():
        for trace_name, trace in traces(length).items():
            name, found = f"{machine_name}: {trace_name}", []
            if not any(part.strip() in name for part in only.split(";")):
                continue
            for seed in range(seeds):
                world = World(machine, trace, seed)
                controller = Controller()
                found.append(figures(world, simulate(world, controller)))
                steps += len(world.phase)
            results[name] = worst(found)
    header = ["trace", "regret", "below plain", "first 400", "back", "drafted"]
    table = [[*header, "speed seen/best of each phase", "missed"]]
    print(markdown_table(table + [row(name, result) for name, result in results.items()]))
    failed = sum(bool(missed(result)) for result in results.values())
    speed = steps / (time.perf_counter() - began)
    print(f"\n{failed} of {len(results)} miss a bar; {steps} steps, {speed:.0f} a second")
    settings = {"only": only, "seeds": seeds, "length": length, "bars": BARS}
    write_results(out, {"settings": settings, "provenance": provenance(), "results": results})


if __name__ == "__main__":
    typer.run(main)
