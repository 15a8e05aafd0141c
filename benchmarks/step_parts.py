"""Take a decode step apart: where its time goes, without us, with our runner alone, and with trees.

    python benchmarks/step_parts.py --target TARGET --questions SET.jsonl --drafter DRAFTER

Engines are alive side by side, one process each, compiled as vLLM comes, and take turns round by
round. Figures are milliseconds of a step by the clock and, in brackets, of all threads' processor
time: what a thread spins away while it waits counts there. Steps that read prompts are among them:
long answers (`--tokens`) make it count little.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from lib.sections import ORDER
from transformers import AutoTokenizer

from vllm_specblock.bench.config import BenchConfig, MethodSpec
from vllm_specblock.bench.engine_arguments import common_arguments
from vllm_specblock.bench.methods import resolve
from vllm_specblock.bench.process import EngineFailed, EngineProcess, end_all
from vllm_specblock.bench.questions import read_questions
from vllm_specblock.bench.table import markdown_table
from vllm_specblock.train.data.prompts import prompt_ids

_ONE: dict[str, Any] = {"num_blocks": 1}
METHODS = {
    "specblock": MethodSpec(base="specblock", speculative=_ONE),
    "merged": MethodSpec(base="merge-ngram", speculative=_ONE),
    "merged, adaptive": MethodSpec(
        base="merged", speculative={"enable_adaptive_verification": True}
    ),
}
LENGTH = 1024
"""Tokens of a request, at most."""
_COMMAND = (sys.executable, "-P", str(Path(__file__).parent / "lib/sections.py"))


def start(config: BenchConfig, logs: Path) -> dict[str, EngineProcess]:
    """All engines, each ready and stopped."""
    logs.mkdir(parents=True, exist_ok=True)
    common = common_arguments(config, LENGTH, on_gpu=False)
    engines: dict[str, EngineProcess] = {}
    try:
        for name, method in resolve(config).items():
            env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
            arguments, log = method.arguments(common), logs / f"{name}.log"
            engines[name] = EngineProcess(name, arguments, env | method.env, log, _COMMAND)
    except BaseException:
        end_all(engines.values())
        raise
    return engines


def take_turns(
    engines: dict[str, EngineProcess],
    prompts: list[list[int]],
    tokens: int,
    sampling_temperature: float,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """By engine: milliseconds of a step, section by section, and τ; medians over rounds."""
    job = {
        "prompts": prompts,
        "seeds": [*range(len(prompts))],
        "temperature": sampling_temperature,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    for engine in engines.values():
        engine.ask(job | {"max_tokens": 24})
    said = [{name: engine.ask(job) for name, engine in engines.items()} for _ in range(rounds)]
    return {name: summary([each[name] for each in said]) for name in engines}


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One engine's figures from its answers to the same job.

    Returns:
        sections: name → [milliseconds of a step by the clock, of processor time]; step: their sum;
        steps: of an answer; tokens: of a step.
    """
    parts = {}
    for section in ORDER:
        each = [
            [1e3 * seconds / a["steps"] for seconds in a["sections"].get(section, [0.0, 0.0])]
            for a in answers
        ]
        parts[section] = [median(column) for column in zip(*each)]
    tokens = sum(map(len, answers[0]["ids"]))
    return {
        "sections": parts,
        "step": [sum(column) for column in zip(*parts.values())],
        "steps": answers[0]["steps"],
        "tokens": tokens / answers[0]["steps"],
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row per section, a column per engine."""
    base = next(iter(found.values()))["step"][0]
    rows = [["ms of a step", *found]]
    for section in (*ORDER, "step"):
        cells = []
        for each in found.values():
            wall, cpu = each["step"] if section == "step" else each["sections"][section]
            cells.append(f"{wall:.2f} ({cpu:.2f})" if wall or cpu else "–")
        rows.append([section, *cells])
    rows.append(["× the first one's step", *(f"{f['step'][0] / base:.2f}" for f in found.values())])
    rows.append(["tokens per step", *(f"{f['tokens']:.2f}" for f in found.values())])
    return markdown_table(rows)


def main(
    target: Annotated[str, typer.Option(help="Folder of the target.")],
    questions: Annotated[Path, typer.Option(help="A .jsonl set of chat questions.")],
    drafter: Annotated[str | None, typer.Option(help="Folder of a SpecBlock drafter.")] = None,
    nodes: Annotated[int, typer.Option(help="Of every tree.")] = 12,
    batch: Annotated[list[int] | None, typer.Option(help="Requests at a time; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="Of every answer.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Turns of every engine.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of target and drafter.")] = "bfloat16",
    eager: Annotated[bool, typer.Option("--eager", help="Compile no engine.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of logs and figures.")] = Path(
        "runs/step_parts"
    ),
) -> None:
    """Print a table per batch size, and write all figures to OUT/step_parts.json."""
    sizes = batch or [1, 4, 16]
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [
        prompt_ids(question.turns[0], tokenizer, chat=True)
        for question in read_questions(questions)[: max(sizes)]
    ]
    names = ["plain", "plain-v2", "ngram", *(METHODS if drafter else ())]
    config = BenchConfig(
        **{"target": target, "set": (str(questions),), "method": names, "define": METHODS},
        **{"nodes": nodes, "batch": max(sizes), "dtype": dtype, "engine": {"enforce_eager": eager}},
        drafter={"specblock": drafter} if drafter else {},
    )
    engines: dict[str, EngineProcess] = {}
    figures = {}
    try:
        engines = start(config, out / "logs")
        for size in sizes:
            found = take_turns(engines, prompts[:size], tokens, temperature, rounds)
            figures[str(size)] = found
            print(
                f"\nbatch {size}, T = {temperature:g}, {dtype}, {tokens} tokens, {rounds} rounds\n"
            )
            print(table(found), flush=True)
    except EngineFailed as error:
        raise SystemExit(f"Error: {error}") from None
    finally:
        end_all(engines.values())
    (out / "step_parts.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
