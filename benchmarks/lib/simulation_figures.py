"""A simulation as figures, and a table of several over their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lib.results_store import markdown_table
from lib.simulation import Served, Simulated

WINDOW = 64
"""Requests that a point of τ over the stream is taken over."""

Figures = dict[str, Any]


def tau_of(served: Sequence[Served]) -> float | None:
    """Tokens per step over some requests; None over none."""
    steps = sum(each.steps for each in served)
    return sum(each.tokens for each in served) / steps if steps else None


def figures(found: Simulated) -> Figures:
    """Return the figures of one policy on one stream."""
    served, phases = found.served, dict.fromkeys(each.phase for each in found.served)
    of = {phase: [each for each in served if each.phase == phase] for phase in phases}
    seconds = sum(each.seconds for each in served)
    return {
        "requests": len(served),
        "tau": tau_of(served),
        "tau_by_phase": {phase: tau_of(each) for phase, each in of.items()},
        "tau_of_last_quarter": {
            phase: tau_of(each[-max(1, len(each) // 4) :]) for phase, each in of.items()
        },
        "tau_by_window": [tau_of(served[n : n + WINDOW]) for n in range(0, len(served), WINDOW)],
        "tokens_per_second": sum(each.tokens for each in served) / seconds,
        "training_share": sum(each.training for each in served) / seconds,
        "updates": found.updates,
        "swaps": found.swaps,
        "refused": found.refused,
        "returns": found.returns,
        "records": found.books,
    }


def table(results: Mapping[str, Figures]) -> str:
    """Return a row per stream and policy: means over the seeds, and for tokens/s their range.

    Args:
        results: figures by "STREAM, seed N: POLICY".
    """
    rows = [["stream", "policy", "τ", "by phase (last quarter)", "tokens/s", "× frozen"]]
    rows[0] += ["training", "updates (heads, full)", "swaps", "refused", "returns"]
    cells: dict[tuple[str, str], dict[str, Figures]] = {}
    for key, found in results.items():
        place, _, policy = key.partition(": ")
        stream, _, seed = place.partition(", seed ")
        cells.setdefault((stream, policy), {})[seed] = found
    for (stream, policy), seeds in cells.items():
        frozen, found = cells.get((stream, "frozen"), {}), list(seeds.values())
        speeds = {seed: each["tokens_per_second"] for seed, each in seeds.items()}
        times = [speeds[n] / frozen[n]["tokens_per_second"] for n in speeds if n in frozen]

        def mean(*names: str, found: list[Figures] = found) -> float:
            values = found
            for name in names:
                values = [each.get(name, 0) for each in values]
            return fmean(len(each) if isinstance(each, list) else each for each in values)

        phases = [
            f"{phase} {mean('tau_by_phase', phase):.2f} ({mean('tau_of_last_quarter', phase):.2f})"
            for phase in found[0]["tau_by_phase"]
        ]
        rows.append(
            [
                *(stream, policy, f"{mean('tau'):.3f}", ", ".join(phases)),
                f"{fmean(speeds.values()):.1f} "
                f"({min(speeds.values()):.1f} – {max(speeds.values()):.1f})",
                f"{fmean(times):.3f}" if times else "–",
                f"{100 * mean('training_share'):.1f} %",
                ", ".join(f"{mean('updates', arm):.1f}" for arm in ("heads", "full")),
                *(f"{mean(name):.1f}" for name in ("swaps", "refused", "returns")),
            ]
        )
    return markdown_table(rows)
