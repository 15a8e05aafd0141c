"""Text that repeats its prompt: SpecBlock alone, n-gram lookup alone, and both together.

    python benchmarks/copying.py [--help]

The prompts ask for an edit or for quotes of a piece of code, and come from files that neither
target nor drafter saw (`examples/copying/README.md` makes all three). None is chosen by what is
answered: how much of an answer is a copy is part of the results. Every engine answers greedily and
sampled, in a process of its own, and is held against plain vLLM. A killed run goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from engine_process import Answer, Request, Task
from lib.cells import PLAIN, TEMPERATURES, answers_of, cell_name, cells, summary
from lib.results_store import MEASURED, ROOT, ResultsStore, from_root, markdown_table, weights
from lib.spec_configs import NGRAM, alone, specblock, together

from vllm_specblock.engine.metrics.acceptance import acceptance_length_of

FOLDER = ROOT / "runs/copying"
BASE = "SpecBlock"
FORMS = ("edit", "quote")
GRAM = 4
"""A token is taken over from a text if it ends so many tokens in a row that are there, too."""
ALONE = ((12, 1), (24, 1), (60, 2))
"""(N, M) of SpecBlock alone: the fastest of them is what has to be beaten."""


def origins(prompt: list[int], answer: list[int]) -> tuple[float, float]:
    """Shares of the answer's tokens taken over from the prompt, and else from the answer itself.

    Small models repeat themselves. What does so is drafted as easily as a copy, and is none.
    """
    asked = {tuple(prompt[i : i + GRAM]) for i in range(len(prompt) - GRAM + 1)}
    text, said, found = prompt + answer, set(), []
    for end in range(len(prompt), len(text)):
        gram = tuple(text[max(0, end - GRAM + 1) : end + 1])
        found.append("prompt" if gram in asked else "answer" if gram in said else "new")
        said.add(gram)
    return found.count("prompt") / len(answer), found.count("answer") / len(answer)


def engines(drafter: str, nodes: int, blocks: int) -> dict[str, dict[str, Any] | None]:
    """Every engine's `speculative_config`; plain vLLM first, since all are held against it.

    Args:
        drafter: folder of the SpecBlock head.
        nodes, blocks: of two heads, and nodes of n-gram lookup alone.
    """
    head = specblock(drafter, num_blocks=blocks)
    found: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for n, m in ALONE:
        found[f"{BASE}, N = {n}, M = {m}"] = alone(specblock(drafter, num_blocks=m), n)
    return found | {
        "n-gram": alone(NGRAM, nodes),
        "route, mean": together(head, NGRAM, nodes, "route", confidence="mean"),
        "route, sum": together(head, NGRAM, nodes, "route", confidence="sum"),
        "merge trie, joint": together(head, NGRAM, nodes, "merge trie, joint"),
    }


def total(result: dict[str, dict[str, Any]], temperature: float) -> dict[str, float]:
    """τ, tokens/s and outputs that differ at one temperature, over all forms."""
    of = [result[cell_name(form, temperature)] for form in FORMS]
    return {
        "tau": acceptance_length_of(cell["counters"] for cell in of),
        "speed": sum(cell["tokens"] for cell in of) / sum(cell["seconds"] for cell in of),
        "different": sum(cell.get("different", 0) for cell in of),
    }


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """A row per engine; × SpecBlock is over the fastest of those alone, by temperature."""
    totals = {name: [total(result, t) for t in TEMPERATURES] for name, result in results.items()}
    bases = [each for name, each in totals.items() if name.startswith(BASE)]
    fastest = [max((each[i]["speed"] for each in bases), default=None) for i in range(2)]
    head = [f"{what}, T = {t:g}" for t in TEMPERATURES for what in ("τ", "tokens/s", "× SpecBlock")]
    rows = [["engine", *head, "outputs that differ"]]
    for name, each in totals.items():
        row = [name]
        for found, base in zip(each, fastest):
            times = f"{found['speed'] / base:.2f}" if base else "–"
            row += [f"{found['tau']:.2f}", f"{found['speed']:.1f}", times]
        asked = sum(len(cell["digests"]) for cell in results[name].values())
        different = sum(found["different"] for found in each)
        rows.append([*row, "–" if name == PLAIN else f"{different} of {asked}"])
    return markdown_table(rows)


def load_prompts(path: Path, count: int) -> dict[str, list[str]]:
    """The first `count` prompts of each form.

    Raises:
        SystemExit: there is no such file, or it has fewer.
    """
    if not path.exists():
        raise SystemExit(f"There are no prompts at {path}: run examples/copying/build.py first.")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {form: [x["prompt"] for x in lines if x["form"] == form][:count] for form in FORMS}
    for form, prompts in found.items():
        if len(prompts) < count:
            raise SystemExit(
                f"{path} has {len(prompts)} prompts of the form {form!r}, but --prompts is {count}."
            )
    return found


def add_origins(
    result: dict[str, Any], answers: list[Answer], prompts: dict[str, list[str]], target: Path
) -> None:
    """Note in every cell what each answer took over, in the prompts' order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    for (form, temperature), answer in zip(cells(FORMS), answers, strict=True):
        ids = tokenizer(prompts[form])["input_ids"]
        shares = [origins(*each) for each in zip(ids, answer.ids, strict=True)]
        cell = result[cell_name(form, temperature)]
        cell["copied"], cell["repeated"] = ([round(x, 3) for x in each] for each in zip(*shares))


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = FOLDER / "target",
    drafter: Annotated[Path, typer.Option(help="A SpecBlock drafter.")] = FOLDER / "drafter",
    prompts_from: Annotated[
        Path, typer.Option(help="JSON lines with `prompt` and `form`.")
    ] = FOLDER / "held_out.jsonl",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each form.")] = 12,
    nodes: Annotated[int, typer.Option(help="Nodes of a tree of two heads.")] = 24,
    blocks: Annotated[int, typer.Option(help="M of SpecBlock as one of two heads.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per prompt.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Passes; the quickest counts.")] = 2,
    dtype: Annotated[str, typer.Option(help="Of all engines.")] = "float32",
    graphs: Annotated[bool, typer.Option(help="Compile, and capture CUDA graphs.")] = False,
    cache_mib: Annotated[int, typer.Option(help="MiB of the cache of keys and values.")] = 256,
    out: Annotated[Path, typer.Option(help="JSON of the results.")] = MEASURED / "copying.json",
) -> None:
    """Measure every engine, and print a table."""
    texts = load_prompts(prompts_from, prompts)
    settings = {
        **{"target": from_root(target), "drafter": from_root(drafter), "prompts": texts},
        **{"weights": [weights(target), weights(drafter)]},
        **{"nodes": nodes, "blocks": blocks, "max_tokens": max_tokens, "batch": 1},
        **{"repeat": repeat, "dtype": dtype, "graphs": graphs},
    }
    engine = {
        "dtype": dtype,
        "enforce_eager": not graphs,
        "kv_cache_memory_bytes": cache_mib << 20,
    }
    store = ResultsStore(out, settings)
    tasks = [Task(texts[form], t, max_tokens, 1, repeat) for form, t in cells(FORMS)]
    measured, failed = {}, 0
    for name, speculative in engines(str(drafter), nodes, blocks).items():
        if name not in store:
            answers = answers_of(Request(str(target), speculative, tasks, engine), name)
            if answers is None:
                if name == PLAIN:
                    raise typer.Exit(1)
                failed += 1
                continue
            result = summary(FORMS, answers, store.results.get(PLAIN))
            if name == PLAIN:
                add_origins(result, answers, texts, target)
            store.add(name, result)
        measured[name] = store.results[name]
    for cell, result in measured[PLAIN].items():
        copied, repeated = (sum(result[key]) / prompts for key in ("copied", "repeated"))
        print(f"{cell}: {copied:.0%} copied from the prompt, {repeated:.0%} the answer's own again")
    print(
        f"\n{len(FORMS) * prompts} prompts, {max_tokens} tokens each, batch 1, {dtype}; "
        f"two heads: N = {nodes}, M = {blocks}\n\n{markdown(measured)}"
    )
    different = any(cell.get("different") for found in measured.values() for cell in found.values())
    if failed or different:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
