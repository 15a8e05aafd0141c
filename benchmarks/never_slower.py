"""Is an engine with draft trees ever slower than plain vLLM, and is it ahead of vLLM's own?

    python benchmarks/never_slower.py --target "$(python examples/smollm2/target.py | tail -n 1)" \
        --drafter examples/smollm2/drafter --questions QUESTIONS

Each cell (requests at a time, temperature) is a `specblock bench` with engines of its own: one
process each, alive side by side, in turns, prompt batch by prompt batch. An engine without a turn
is stopped, so load on the machine slows all of them. A killed run goes on.

Figures are times per token over plain vLLM's, prompts included, the mean over the sets. All answers
have the same length (`ignore_eos`): at T > 0 vLLM's drafters and its two model runners give other
texts. A batch ends with its slowest request. With `--waves 3`, three times as many requests come,
and the next one begins where one ends, as in a server.

"First" are the passes over the sets in which plain vLLM takes its first `--first-steps` decode
steps, "later" those after it. A warm-up of 8 steps is in neither.

CPU time is of all threads. Beside other work, set OMP_WAIT_POLICY=passive or use one thread: what
a thread spins away while it waits for one without a core counts, 20 times a step's own work.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from lib.neighbour import neighbour
from lib.options import numbers
from lib.results_store import MEASURED, markdown_table
from lib.spec_configs import LOOKUP, vllms
from transformers import AutoTokenizer

from vllm_specblock.bench.config import BenchConfig, BenchError, MethodSpec
from vllm_specblock.bench.methods import RUNNER
from vllm_specblock.bench.questions import read_sets
from vllm_specblock.bench.results import MEAN, Figures, summarise
from vllm_specblock.bench.run import Bench, measure, prepare

_TREES = {"ngram": "ngram", "specblock": "specblock", "eagle3": "eagle3", "merged": "merge-ngram"}
"""Our drafters, and the methods of `specblock bench` that they change."""
FIXED_NODES = (4, 12, 24)
SERVED = {
    # The methods of `specblock bench` verify every node; a server has our defaults.
    name: MethodSpec(base=base, speculative={"enable_adaptive_verification": None})
    for name, base in _TREES.items()
}
FIXED = {
    f"{name}-{nodes}": MethodSpec(base=base, speculative={"num_speculative_tokens": nodes})
    for name, base in _TREES.items()
    for nodes in FIXED_NODES
}
VLLM = {
    "vllm-ngram": MethodSpec(speculative=vllms("ngram", 5, **LOOKUP), env={RUNNER: None}),
    "vllm-suffix": MethodSpec(speculative={"method": "suffix"}, env={RUNNER: None}),
    "vllm-eagle3": MethodSpec(base="eagle3-chain"),
}
ENGINES = SERVED | FIXED | VLLM
"""Engines by name, as a user would serve them: ours by default, ours fixed, and vLLM's own."""

PLAIN, RIVAL, RANDOM = "plain", "vllm-ngram", "random"
FIRST, LATER = "first", "later"
RANDOM_TOKENS, WARM_UP = 60, 8


def default_methods(drafter: Path | None, eagle3: Path | None, fixed: bool) -> list[str]:
    kinds = ["ngram"]
    kinds += ["specblock", "merged"] if drafter else []
    kinds += ["eagle3"] if eagle3 else []
    names = [PLAIN, "plain-v2", *kinds]
    names += [name for name in FIXED if fixed and name.rpartition("-")[0] in kinds]
    return [*names, RIVAL, "vllm-suffix", *(["vllm-eagle3"] if eagle3 else [])]


def random_texts(target: Path, count: int) -> list[str]:
    tokenizer, draw = AutoTokenizer.from_pretrained(target), random.Random(0)
    ids = [draw.choices(range(tokenizer.vocab_size), k=RANDOM_TOKENS) for _ in range(count)]
    return tokenizer.batch_decode(ids)


def write_sets(sets: Mapping[str, Iterable[str]], count: int, folder: Path) -> str:
    """Write `count` questions of each set as `specblock bench` reads them; returns the folder.

    A set that is too small begins again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in sets.items():
        chosen = itertools.islice(itertools.cycle(texts), count)
        lines = [json.dumps({"id": str(i), "turns": [text]}) for i, text in enumerate(chosen)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def figures_of(bench: Bench, first_steps: int, waves: int) -> dict[str, list[Figures]]:
    """Figures of the first steps and of those after, by phase."""
    pass_steps = len(bench.sets) * bench.config.max_new_tokens * waves
    passes = {key: place // len(bench.sets) for place, key in enumerate(bench.store.units)}
    found = {}
    for phase in (FIRST, LATER):
        those = [
            record
            for record in bench.store.records
            if (passes[record.unit.key] * pass_steps < first_steps) == (phase == FIRST)
        ]
        found[phase] = summarise(bench, those, PLAIN)
    return found


def rows_of(phases: Mapping[str, Sequence[Figures]]) -> dict[str, dict[str, Any]]:
    """One cell's figures by engine; None where there are none."""
    means = {(p, each.method): each for p in phases for each in phases[p] if each.set == MEAN}
    later = [each for each in phases[LATER] if each.set != MEAN]
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for _, name in means):
        known = [means[phase, name] for phase in phases if (phase, name) in means]
        sets = [each for each in later if each.method == name]
        worst = min(sets, key=lambda each: each.speedup_cpu, default=None)
        found[name] = {
            "worst": worst and worst.speedup_cpu,
            "worst_set": worst and worst.set,
            "tau": known[-1].tau,
            "outputs": sum(each.outputs for each in known),
            "different": sum(each.different or 0 for each in known),
        }
        for phase in phases:
            each = means.get((phase, name))
            found[name] |= {f"{phase}_cpu": each and each.speedup_cpu}
            found[name] |= {f"{phase}_wall": each and each.speedup}
    for name, row in found.items():
        fixed = [f"{name}-{nodes}" for nodes in FIXED_NODES]
        row["over_vllm_ngram"] = over(found, name, [RIVAL])
        row["over_best_fixed"] = over(found, name, fixed)
    return found


def over(found: Mapping[str, dict[str, Any]], name: str, others: Iterable[str]) -> float | None:
    """Speed over the best of `others`, by CPU time after the first steps."""
    speeds = [found[other]["later_cpu"] for other in others if other in found]
    own = found[name]["later_cpu"]
    return own / max(speeds) if own and all(speeds) and speeds else None


def table(cells: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A row per cell and engine."""
    head = ["cell", "engine", "first: CPU (wall)", "later: CPU (wall)", "worst set later"]
    rows = [[*head, "/ vLLM's ngram", "/ best fixed", "τ", "answers that differ"]]
    for cell, engines in cells.items():
        for name, row in engines.items():
            shown = {k: f"{v:.2f}" if isinstance(v, float) else v or "–" for k, v in row.items()}
            rows.append(
                [
                    *(cell, name),
                    *(f"{shown[f'{p}_cpu']} ({shown[f'{p}_wall']})" for p in (FIRST, LATER)),
                    f"{shown['worst']} {shown['worst_set']}",
                    *(shown[key] for key in ("over_vllm_ngram", "over_best_fixed", "tau")),
                    f"{row['different']} of {row['outputs']}",
                ]
            )
    return markdown_table(rows)


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    questions: Annotated[
        list[str], typer.Option(help="NAME=FILE of {id, turns} lines, or a folder of such files.")
    ],
    drafter: Annotated[Path | None, typer.Option(help="A SpecBlock drafter.")] = None,
    eagle3: Annotated[Path | None, typer.Option(help="An EAGLE-3 drafter.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"Engines: {', '.join(ENGINES)}, or of specblock bench. Default: all."),
    ] = None,
    fixed: Annotated[bool, typer.Option(help="Trees of fixed sizes as well.")] = False,
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,2,4,8,16,32",
    waves: Annotated[
        int, typer.Option(min=1, help="Of requests; those beyond the first queue.")
    ] = 1,
    temperature: Annotated[list[float], typer.Option(help="0 is greedy.")] = [0.0, 0.8],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=2, help="Generated per request.")] = 64,
    passes: Annotated[int, typer.Option(min=1, help="Over all sets, a batch of each.")] = 2,
    first_steps: Annotated[int, typer.Option(help="Plain steps that count as first.")] = 400,
    characters: Annotated[int, typer.Option(help="Questions are cut to so many.")] = 1500,
    random_tokens: Annotated[bool, typer.Option(help="A set of random tokens as well.")] = True,
    beside: Annotated[
        bool, typer.Option("--neighbour", help="Another process takes all cores in bursts.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of all engines.")] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(help="Tokens of a request.")] = 1024,
    engine: Annotated[str, typer.Option(help="More arguments of LLM, of all, as JSON.")] = "{}",
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = MEASURED / "never_slower",
) -> None:
    """Measure every engine in every cell, print a table."""
    sizes, names = numbers(batches, "--batches"), method or default_methods(drafter, eagle3, fixed)
    drafters = {"specblock": drafter, "eagle3": eagle3}
    common: dict[str, Any] = {
        "target": target,
        "method": names,
        "drafter": {name: folder for name, folder in drafters.items() if folder},
        "define": {name: spec for name, spec in ENGINES.items() if name in names},
        "raw": not AutoTokenizer.from_pretrained(target).chat_template,
        **{"max_new_tokens": tokens, "ignore_eos": True, "rounds": 1},
        **{"dtype": dtype, "max_model_len": max_model_len},
    }
    cells, failures, path = {}, {}, out / "never_slower.json"
    try:
        asked = read_sets(BenchConfig(set=questions, **common))
        sets = {name: [q.turns[0][:characters] for q in those] for name, those in asked.items()}
        if random_tokens:
            sets[RANDOM] = random_texts(target, passes * waves * max(sizes))
        for heat, size in itertools.product(temperature, sizes):
            folder = out / f"batch_{size}_T_{heat:g}"
            chosen = write_sets(sets, passes * waves * size, folder / "sets")
            # One engine for any number of requests at a time; with a queue, as many as that.
            most = {"max_num_seqs": max(sizes) if waves == 1 else size} | json.loads(engine)
            given = {"batch": size * waves, "temperature": (heat,), "engine": most}
            config = BenchConfig(set=(chosen,), out=folder, **given, **common)
            bench = prepare(config)
            bench.warm_up_tokens = WARM_UP
            with neighbour() if beside else nullcontext():
                measure(bench)
            failures |= bench.failures
            cell = f"batch {size}, T = {heat:g}"
            cells[cell] = rows_of(figures_of(bench, first_steps, waves))
            print(f"\n{table({cell: cells[cell]})}\n", flush=True)
            path.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    except BenchError as error:
        raise SystemExit(f"Error: {error}") from None
    print(f"\n{table(cells)}\n\nResults: {path}")
    for reason in failures.values():
        print(f"Left out: {reason}")


if __name__ == "__main__":
    typer.run(main)
