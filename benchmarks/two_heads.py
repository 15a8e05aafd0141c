"""τ and tokens/s of two heads of one target, alone and together, on text that suits either.

    python benchmarks/two_heads.py [--help]

Head 1 learned code, head 2 tables, and an EAGLE-3 head both (`examples/two_heads/README.md` makes
all three). Every engine answers the same held-out prompts of both slices, greedy and sampled, in a
process of its own, and its output is held against plain vLLM's. A killed run goes on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from engine_process import TARGET, EngineFailed, Request, Task, run
from lib.options import PLAIN, chosen, numbers
from lib.results_store import MEASURED, ROOT, ResultsStore, from_root, markdown_table, weights
from lib.spec_configs import POLICIES, alone, eagle3, eagle3_chain, specblock, together

FOLDER = ROOT / "runs/two_heads"
HEADS = ROOT / "examples/two_heads"
CHAIN = "EAGLE-3 chain, vLLM's own"
"""Its rejection sampler keeps the law of a sampled output, not its tokens: only those of T = 0
have to be plain vLLM's."""
SLICES = ("code", "tables")
TEMPERATURES = (0.0, 1.0)
CELLS = [(name, temperature) for name in SLICES for temperature in TEMPERATURES]


def cell_name(name: str, temperature: float) -> str:
    return f"{name}, T = {temperature:g}"


CELL_NAMES = [cell_name(*cell) for cell in CELLS]


def engines(
    code: str, tables: str, eagle: str, budgets: list[int], chains: list[int], how: dict[str, Any]
) -> dict[str, dict[str, Any] | None]:
    """Every engine's `speculative_config` by its name; plain vLLM first, since all are held
    against it.

    Args:
        code, tables, eagle: folders of the drafters.
        budgets: nodes of the trees; chains: tokens of vLLM's own EAGLE-3.
        how: options of both SpecBlock heads, and `confidence` of the router.
    """
    grow = {key: value for key, value in how.items() if key != "confidence"}
    first, second = specblock(code, **grow), specblock(tables, **grow)
    found: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for tokens in chains:
        found[f"{CHAIN} @ {tokens}"] = eagle3_chain(eagle, tokens)
    for nodes in budgets:
        found[f"head 1 (code) @ {nodes}"] = alone(first, nodes)
        found[f"head 2 (tables) @ {nodes}"] = alone(second, nodes)
        found[f"EAGLE-3 tree @ {nodes}"] = alone(eagle3(eagle), nodes)
        for policy, keys in POLICIES.items():
            sure = {"confidence": how["confidence"]} if keys["draft_policy"] == "route" else {}
            found[f"{policy} @ {nodes}"] = together(first, second, nodes, policy, **sure)
    return found


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """A row per engine; a cell holds τ and tokens/s, and how many times plain vLLM's it is."""
    head = ["engine @ nodes", *CELL_NAMES, "outputs that differ"]
    rows = [head]
    for engine, result in results.items():
        row, different, asked = [engine], 0, 0
        for name in CELL_NAMES:
            cell, plain = result[name], results[PLAIN][name]
            times = cell["tokens_per_second"] / plain["tokens_per_second"]
            row.append(f"τ {cell['tau']:.2f}, {cell['tokens_per_second']:.0f}/s ({times:.2f} ×)")
            different += cell.get("different", 0)
            asked += len(cell["digests"])
        rows.append([*row, "–" if engine == PLAIN else f"{different} of {asked}"])
    return markdown_table(rows)


def must_not_differ(results: dict[str, dict[str, Any]]) -> int:
    """Outputs that differ where none may."""
    greedy = {cell_name(name, 0.0) for name in SLICES}
    return sum(
        cell.get("different", 0)
        for engine, result in results.items()
        for name, cell in result.items()
        if name in greedy or not engine.startswith(CHAIN)
    )


def texts_of(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a file.

    Raises:
        SystemExit: there is no such file.
    """
    if not path.exists():
        raise SystemExit(
            f"There are no prompts at {path}: run examples/two_heads/prompts.py first."
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


def measure(request: Request, store: ResultsStore, name: str) -> bool:
    """Run one engine and keep its results; False if it failed."""
    print(f"{name} …", flush=True)
    try:
        answers = dict(zip(CELL_NAMES, run(request), strict=True))
    except EngineFailed as error:
        print(f"{name}: {error}")
        return False
    plain = store.results.get(PLAIN, {})
    store.add(name, {cell: each.summary(plain.get(cell)) for cell, each in answers.items()})
    for cell, result in store.results[name].items():
        print(f"  {cell}: τ {result['tau']:.2f}, {result['tokens_per_second']:.1f} tokens/s")
    return True


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = TARGET,
    code: Annotated[Path, typer.Option(help="Head 1, a SpecBlock drafter.")] = HEADS / "code",
    tables: Annotated[Path, typer.Option(help="Head 2, another.")] = HEADS / "tables",
    eagle: Annotated[Path, typer.Option("--eagle3", help="An EAGLE-3 drafter.")] = HEADS / "eagle3",
    prompts_from: Annotated[
        Path, typer.Option(help="Has code_held_out.jsonl and tables_held_out.jsonl.")
    ] = FOLDER,
    budgets: Annotated[str, typer.Option(help="Nodes of a tree.")] = "30,60,120",
    chains: Annotated[
        str, typer.Option(help="Tokens of vLLM's own EAGLE-3; the best of them counts.")
    ] = "7,3,5",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each slice.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = 128,
    batch: Annotated[str, typer.Option(help="Prompts at a time; more sizes, more tables.")] = "1",
    repeat: Annotated[int, typer.Option(min=1, help="Passes; the quickest counts.")] = 2,
    blocks: Annotated[int, typer.Option(help="M, forwards of a SpecBlock head.")] = 2,
    starts: Annotated[int, typer.Option(help="S, nodes that further blocks start from.")] = 8,
    confidence: Annotated[str, typer.Option(help="Of the router: mean or sum.")] = "mean",
    dtype: Annotated[str, typer.Option(help="Of all engines.")] = "float32",
    graphs: Annotated[bool, typer.Option(help="Compile, and capture CUDA graphs.")] = False,
    cache_mib: Annotated[int, typer.Option(help="MiB of the cache of keys and values.")] = 256,
    only: Annotated[
        str | None, typer.Option(help='Parts of engines\' names, e.g. "head 1; trie".')
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON of the results; one per batch size.")] = MEASURED
    / "two_heads.json",
    dry_run: Annotated[bool, typer.Option(help="Only say what would run.")] = False,
) -> None:
    """Measure every engine, print a table per batch size."""
    how = {"num_blocks": blocks, "num_starts": starts, "confidence": confidence}
    folders = [str(code), str(tables), str(eagle)]
    found = engines(*folders, numbers(budgets, "--budgets"), numbers(chains, "--chains"), how)
    found = chosen(found, only)
    if dry_run:
        for name, speculative in found.items():
            print(f"{name}: {speculative}")
        return
    texts = {name: texts_of(prompts_from / f"{name}_held_out.jsonl", prompts) for name in SLICES}
    failed, different = [], 0
    for size in numbers(batch, "--batch"):
        settings = {
            **{"target": from_root(target), "heads": [from_root(f) for f in (code, tables, eagle)]},
            **{"weights": [weights(folder) for folder in (target, code, tables, eagle)]},
            **{"prompts": texts, "max_tokens": max_tokens},
            **{"batch": size, "repeat": repeat, "dtype": dtype, "graphs": graphs, "how": how},
        }
        path = out if size == 1 else out.with_stem(f"{out.stem}_batch{size}")
        store = ResultsStore(path, settings)
        tasks = [Task(texts[name], t, max_tokens, size, repeat) for name, t in CELLS]
        arguments = {
            "dtype": dtype,
            "enforce_eager": not graphs,
            "kv_cache_memory_bytes": cache_mib << 20,
        }
        for name, speculative in found.items():
            if name not in store and not measure(
                Request(str(target), speculative, tasks, arguments), store, name
            ):
                failed.append(name)
                if name == PLAIN:
                    raise typer.Exit(1)
        different += must_not_differ(store.results)
        print(
            f"\nbatch {size}, {dtype}, {len(texts[SLICES[0]])} prompts a slice, "
            f"{max_tokens} tokens each\n\n{markdown(store.results)}\n"
        )
    if failed or different:
        print(f"failed: {', '.join(failed) or 'none'}", file=sys.stderr)
        print(f"outputs that must not differ and do: {different}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
