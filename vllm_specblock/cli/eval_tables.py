"""The figures of `specblock eval` as tables."""

from __future__ import annotations

from collections.abc import Sequence
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


def _table(title: str, columns: Sequence[str], rows: dict[str, list[str]]) -> Table:
    table = Table(columns[0], title=title, title_justify="left", box=box.SIMPLE)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _tau(results: Results) -> Table:
    columns, rows = ["drafted"], {name: list[str]() for name in results[0]["trees"]}
    for result in results:
        columns += [f"τ at T = {result['temperature']:g}", "steps", "nodes", "β"]
        for name, reach in result["trees"].items():
            tau = f"{reach['tau']:.3f} ± {reach['error']:.3f}"
            steps, nodes = f"{reach['steps']:,}", f"{reach['nodes']:.1f}"
            rows[name] += [tau, steps, nodes, f"{reach['sharpness']:.2f}"]
    return _table("τ: tokens per step, ± its standard error; nodes of a tree", columns, rows)


def _alpha(results: Results) -> Table:
    """A row per position of the chain."""
    columns = ["k = m,j", *(f"α_m,j at T = {result['temperature']:g}" for result in results)]
    chains, rows = [result["chain"] for result in results], dict[str, list[str]]()
    for k, shares in enumerate(zip(*(chain["alpha"] for chain in chains))):
        m, j = divmod(k, chains[0]["block_size"])
        rows[f"{k + 1} = {m + 1},{j + 1}"] = list(map(_percent, shares))
    return _table("first choices that are right, given that all before were", columns, rows)


def _rank(result: dict[str, Any]) -> Table:
    chain, names = result["chain"], ("1", "2–4", "5–10", "beyond")
    title = f"rank head at T = {result['temperature']:g}, {chain['rank_positions']:,} positions"
    rows = {name: [*map(_percent, each.values())] for name, each in zip(names, chain["rank"])}
    return _table(title, ["rank", "frequency", "precision", "recall", "F1"], rows)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
