"""A simulation as figures: JSON, a Markdown table, and τ over the stream as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.simulation import Served, Simulated
from vllm_specblock.bench.table import markdown_table

WINDOW = 64
"""Requests that a point of τ over the stream is taken over."""

SHARE = 0.9
"""Of a phase's final gain: how soon it is reached is how quickly a policy adapts."""

Figures = dict[str, Any]


def tau_of(served: Sequence[Served]) -> float | None:
    """Tokens per step over some requests; None over none."""
    steps = sum(each.steps for each in served)
    return sum(each.tokens for each in served) / steps if steps else None


def windows(served: Sequence[Served], size: int) -> list[float | None]:
    """τ of every `size` requests, the last ones being fewer."""
    return [tau_of(served[first : first + size]) for first in range(0, len(served), size)]


def figures(found: Simulated, frozen: Simulated | None = None, window: int = WINDOW) -> Figures:
    """Return the figures of one policy on one stream.

    Args:
        frozen: the same stream without adaptation, which gains are over.
        window: requests of a point of τ over the stream.
    """
    phases = dict.fromkeys(each.phase for each in found.served)
    of = {phase: [each for each in found.served if each.phase == phase] for phase in phases}
    seconds = sum(each.seconds for each in found.served)
    training = sum(each.training for each in found.served)
    result: Figures = {
        "requests": len(found.served),
        "tau": tau_of(found.served),
        "tau_by_phase": {phase: tau_of(served) for phase, served in of.items()},
        "tau_of_last_quarter": {
            phase: tau_of(served[-max(1, len(served) // 4) :]) for phase, served in of.items()
        },
        "tau_by_window": windows(found.served, window),
        "window": window,
        "tokens_per_second": sum(each.tokens for each in found.served) / seconds,
        "training_share": training / seconds,
        "updates": found.updates,
        "swaps": found.swaps,
        "refused": found.refused,
        "returns": found.returns,
        "records": found.books,
        "held_out": found.held_out,
    }
    if frozen is not None:
        result["requests_to_adapt"] = {
            phase: requests_to_adapt(
                served, [each for each in frozen.served if each.phase == phase]
            )
            for phase, served in of.items()
        }
    return result


def requests_to_adapt(
    served: Sequence[Served], frozen: Sequence[Served], size: int = 8
) -> int | None:
    """Requests until a phase has nine tenths of its final gain over frozen, to the next `size`;
    None where it gains nothing in the end.

    Gains are of `size` requests each, on the same texts; the final one is of the last quarter.
    """
    last = max(1, len(served) // 4)
    mine, other = tau_of(served[-last:]), tau_of(frozen[-last:])
    if mine is None or other is None or mine <= other:
        return None
    final = mine - other
    gains = [
        None if mine is None or other is None else mine - other
        for mine, other in zip(windows(served, size), windows(frozen, size))
    ]
    reached = (
        number for number, gain in enumerate(gains, 1) if gain is not None and gain >= SHARE * final
    )
    return min(next(reached, len(gains)) * size, len(served))


def markdown(results: Mapping[str, Mapping[str, Figures]]) -> str:
    """A table per stream; results by stream and policy."""
    parts = []
    for stream, policies in results.items():
        first = next(iter(policies.values()))
        phases, held_out = list(first["tau_by_phase"]), range(len(first["held_out"]))
        head = ["policy", *(f"τ {phase} (last quarter)" for phase in phases), "tokens/s"]
        head += ["training", "updates (heads, full)", "swaps", "refused", "returns"]
        head += [f"τ held out {number + 1}" for number in held_out]
        rows = [head]
        for policy, found in policies.items():
            row = [policy]
            for phase in phases:
                late = found["tau_of_last_quarter"][phase]
                row.append(f"{found['tau_by_phase'][phase]:.2f} ({late:.2f})")
            updates = [str(found["updates"].get(arm, 0)) for arm in ("heads", "full")]
            row += [f"{found['tokens_per_second']:.1f}", f"{100 * found['training_share']:.1f} %"]
            row += [", ".join(updates), str(found["swaps"]), str(found["refused"])]
            row += [str(len(found["returns"])), *(f"{tau:.2f}" for tau in found["held_out"])]
            rows.append(row)
        parts.append(f"**{stream}**, {first['requests']} requests\n\n{markdown_table(rows)}")
    return "\n\n".join(parts) + "\n"


def draw(results: Mapping[str, Figures], title: str, path: Path) -> bool:
    """τ over one stream, a line per policy, as a picture; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    for policy, found in results.items():
        size, taus = found["window"], found["tau_by_window"]
        ends = [min((n + 1) * size, found["requests"]) for n in range(len(taus))]
        middle = [(n * size + end) / 2 for n, end in enumerate(ends)]
        axes.plot(middle, taus, marker="o", markersize=3, label=policy)
    axes.set_xlabel("requests served")
    axes.set_ylabel("τ, tokens per step")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return True
