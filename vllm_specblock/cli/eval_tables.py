"""The figures of `specblock eval` as tables."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Results = list[dict[str, Any]]
"""Per temperature: `Figures.as_json()`, and `temperature`."""


def print_tables(whole: dict[str, Any]) -> None:
    """Print τ, α and the rank head; `whole` is what --json writes."""
    results = whole["results"]
    console = Console(highlight=False)
    # In a pipe rich takes 80 columns, which would break cells of several temperatures.
    console.width = max(console.width, 24 + 40 * len(results))
    console.print(
        f"{whole['prompts']} prompts, {whole['device']}, {whole['dtype']}, seed {whole['seed']}",
        markup=False,
    )
    console.print(_tau(results), _alpha(results), *map(_rank, results))


def _table(title: str, first: str) -> Table:
    return Table(first, title=title, title_justify="left", box=box.SIMPLE)


def _tau(results: Results) -> Table:
    table = _table("τ: tokens per step, ± its standard error; nodes of a tree", "drafted")
    for result in results:
        for column in (f"τ at T = {result['temperature']:g}", "steps", "nodes", "β"):
            table.add_column(column, justify="right")
    for name in results[0]["trees"]:
        cells = []
        for reach in (result["trees"][name] for result in results):
            cells += [
                f"{reach['tau']:.3f} ± {reach['error']:.3f}",
                f"{reach['steps']:,}",
                f"{reach['nodes']:.1f}",
                f"{reach['sharpness']:.2f}",
            ]
        table.add_row(name, *cells)
    return table


def _alpha(results: Results) -> Table:
    """A row per position of the chain."""
    table = _table("first choices that are right, given that all before were", "k = m,j")
    for result in results:
        table.add_column(f"α_m,j at T = {result['temperature']:g}", justify="right")
    chains = [result["chain"] for result in results]
    for k, shares in enumerate(zip(*(chain["alpha"] for chain in chains))):
        m, j = divmod(k, chains[0]["block_size"])
        table.add_row(f"{k + 1} = {m + 1},{j + 1}", *map(_percent, shares))
    return table


def _rank(result: dict[str, Any]) -> Table:
    chain = result["chain"]
    title = f"rank head at T = {result['temperature']:g}, {chain['rank_positions']:,} positions"
    table = _table(title, "rank")
    for column in ("frequency", "precision", "recall", "F1"):
        table.add_column(column, justify="right")
    for name, bucket in zip(("1", "2–4", "5–10", "beyond"), chain["rank"]):
        table.add_row(name, *map(_percent, bucket.values()))
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
