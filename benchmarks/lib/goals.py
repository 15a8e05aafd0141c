"""Goals of `end_to_end.py`, and what its results say to them."""

from __future__ import annotations

from typing import Any

from lib.options import PLAIN

SPEED_GOAL, SPEED_TAU = 3.5, 4.41
"""Tokens/s over plain vLLM at batch 1, where the tree of 60 has this τ."""
VERIFY_GOAL, VERIFY_NODES, VERIFY_CONTEXT = 1.10, 60, 2048
"""A step without its drafting, over a plain decode step; batch 1."""
DRAFTING_GOAL = 0.13
"""Share of a step that drafting takes."""
MEMORY_GOAL = 300e6
"""Bytes beyond the drafter's weights; the cache is the same for all engines."""


def goals(results: dict[str, dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    """A sentence per goal that these results can speak to."""
    ours = {name: each for name, each in results.items() if name.startswith("SpecBlock")}
    plain = {each["batch"]: each for name, each in results.items() if name.startswith(PLAIN + ",")}
    best: dict[int, float] = {}
    for each in ours.values():
        if each["batch"] in plain:
            speed = each["tokens_per_second"] / plain[each["batch"]]["tokens_per_second"]
            best[each["batch"]] = max(speed, best.get(each["batch"], 0.0))
    said = []
    if 1 in best and settings["tau"] == SPEED_TAU:
        said.append(
            f"best × vLLM at batch 1, τ = {SPEED_TAU} at 60 nodes: {best[1]:.2f} "
            f"(goal ≥ {SPEED_GOAL})"
        )
    if best:
        worst = min(best, key=best.get)
        said.append(f"best × vLLM at the worst batch, {worst}: {best[worst]:.2f} (goal ≥ 1.0)")
    tree = ours.get(f"SpecBlock @ {VERIFY_NODES}, batch 1")
    if tree is None:
        return said
    said.append(
        f"drafting share, batch 1: {tree['drafting_ms'] / tree['step_ms']:.0%} "
        f"(goal ≤ {DRAFTING_GOAL:.0%})"
    )
    if 1 in plain:
        rest = (tree["step_ms"] - tree["drafting_ms"]) / plain[1]["step_ms"]
        at = f"batch 1, context {settings['context']}"
        goal = f" (goal ≤ {VERIFY_GOAL})" if settings["context"] == VERIFY_CONTEXT else ""
        said.append(f"step without drafting over a plain step, {at}: {rest:.2f}{goal}")
        if plain[1]["device_bytes"]:
            over = tree["device_bytes"] - plain[1]["device_bytes"] - settings["drafter_bytes"]
            said.append(
                f"GPU memory beyond weights and cache: {over / 1e6:.0f} MB "
                f"(goal ≤ {MEMORY_GOAL / 1e6:.0f})"
            )
    return said
