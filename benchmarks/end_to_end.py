"""Tokens/s in vLLM at the shapes of real targets, acceptance imposed; or of the example pair.

    python benchmarks/end_to_end.py --model llama-8b     # random weights, on one large GPU
    python benchmarks/end_to_end.py --model pair         # the example pair, real acceptance
    python benchmarks/end_to_end.py --model lfm2-350m    # a hybrid, on a CPU
    python benchmarks/end_to_end.py --help

With random weights nothing would be accepted. vLLM's `rejection_sample_method: "synthetic"` imposes
acceptance on its own chains, and `lib/imposed_acceptance.py` on our trees: a first choice at depth
k is right with probability α_k, for every drafter (`lib/acceptance.py`), n-gram lookup included.
Answers then mean nothing; the cost of a step is real.

Every engine runs in a process of its own, with the same KV cache size. A killed run resumes. On a
CPU the engines of a batch take turns, pass by pass, so other load slows all of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import truediv
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import steady_state
import torch
import typer
from lib import in_process, pair
from lib.acceptance import PAPER_TREE, chain_tau, imposed, profile, tree_tau
from lib.model_configs import MODELS, write_drafter, write_eagle3, write_target
from lib.options import numbers
from lib.results_store import MEASURED, ResultsStore, device_name, markdown_table
from lib.spec_configs import LOOKUP, NGRAM, alone, specblock, vllms
from steady_state import DEVICE, DRAFTING, STEPS, TOKENS

from vllm_specblock.bench.process import (
    BLOCK,
    EngineFailed,
    EngineProcess,
    end_all,
    shared_arguments,
)
from vllm_specblock.config import METHOD, parse_drafter
from vllm_specblock.engine.metrics.acceptance import acceptance_length

PAIR, PLAIN = "pair", "vLLM"
# In one process, a second thread of torch only spins beside vLLM's own.
ENV = in_process.ENV | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
COMMAND = (sys.executable, steady_state.__file__)
CLOCKS = "seconds", "cpu"
"""What an answer has of each clock."""


@dataclass(frozen=True)
class Place:
    """Folders of the models that the engines load; best: α by depth, None for real acceptance;
    engine: arguments of `LLM` that follow from them."""

    target: Path
    drafter: Path
    eagle: Path
    best: list[float] | None
    engine: dict[str, Any]


@contextmanager
def made(model: str, length: int, tau: float) -> Iterator[Place]:
    """Yield the example pair, or a target and drafters of random weights in a temporary folder."""
    if model == PAIR:
        yield Place(pair.TARGET, pair.DRAFTER, pair.EAGLE3, None, {})
        return
    best, sizes = profile(model, tau), MODELS[model]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        target = write_target(root / "target", sizes, length)
        yield Place(
            target,
            write_drafter(root / "drafter", sizes),
            write_eagle3(root / "eagle3", sizes),
            best,
            {"load_format": "dummy", "skip_tokenizer_init": True},
        )


def engines(
    place: Place, nodes: list[int], chains: list[int], gpu: bool
) -> dict[str, dict[str, Any] | None]:
    """Return every engine's `speculative_config` by its name, plain vLLM first.

    vLLM's n-gram kernels need a GPU; elsewhere our lookup runs, with its real acceptance.
    """
    found: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for tokens in chains:
        if gpu:
            found[f"n-gram @ {tokens}"] = vllms("ngram_gpu", tokens, **LOOKUP)
        found[f"EAGLE-3 chain @ {tokens}"] = vllms("eagle3", tokens, model=str(place.eagle))
    tree, most = specblock(place.drafter), max(nodes)
    found |= {f"SpecBlock @ {count}": alone(tree, count) for count in nodes}
    found[f"SpecBlock, 8 bits @ {most}"] = alone(tree, most) | {"quantization": "fp8"}
    adaptive = {"enable_adaptive_verification": True}
    found[f"SpecBlock, adaptive @ {most}"] = alone(tree, most) | adaptive
    if place.best is not None:
        for keys in filter(None, found.values()):
            keys |= imposed(place.best, keys["num_speculative_tokens"])
    if not gpu:
        found |= {f"n-gram, ours @ {tokens}": alone(NGRAM, tokens) for tokens in chains}
    return found


def expected_tau(place: Place, speculative: dict[str, Any] | None) -> float | None:
    """Return the τ of the imposed profile; None where nothing is imposed."""
    if place.best is None or "rejection_sample_method" not in (speculative or {}):
        return None
    count = speculative["num_speculative_tokens"]
    if speculative["method"] != METHOD:
        return chain_tau(place.best, count)
    served = parse_drafter({}, "specblock", num_nodes=count)
    sizes = {"num_blocks": served.num_blocks, "num_starts": min(served.num_starts, count)}
    return tree_tau(place.best, replace(PAPER_TREE, budget=count, **sizes))


def prompts_of(model: str, vocabulary: int, context: int, batch: int) -> list[Any]:
    """Return `context` random ids each; for the pair, beginnings of held-out files."""
    if model == PAIR:
        texts = pair.beginnings(batch)
        return [texts[index % len(texts)] for index in range(batch)]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (batch, context), generator=draw)
    return [{"prompt_token_ids": each} for each in ids.tolist()]


def chosen(found: dict[str, Any], only: str | None) -> dict[str, Any]:
    """Return plain vLLM, and the engines whose name has one of `only`'s parts (a; b)."""
    if only is None:
        return found
    parts = [part.strip() for part in only.split(";") if part.strip()]
    for part in parts:
        if not any(part in name for name in found):
            raise SystemExit(f"--only {part!r} is in no name; there are: {'; '.join(found)}.")
    kept = [name for name in found if name == PLAIN or any(part in name for part in parts)]
    return {name: found[name] for name in kept}


def run(
    asked: dict[str, dict[str, Any]], job: dict[str, Any], passes: int, logs: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of engines that take turns, after a pass that warms them up.

    asked: arguments of `LLM` by the engine's name.
    """
    logs.mkdir(parents=True, exist_ok=True)
    alive: list[EngineProcess] = []
    try:
        for name, arguments in asked.items():
            log = logs / f"{name.replace(' ', '_')}.log"
            alive.append(EngineProcess(name, arguments, ENV, log, COMMAND))
            alive[-1].wait()
        rounds = [[each.ask(job) for each in alive] for _ in range(1 + passes)]
        return {name: [*answers] for name, answers in zip(asked, zip(*rounds[1:]))}
    finally:
        end_all(alive)


def summary(answers: list[dict[str, Any]], batch: int, expected: float | None) -> dict[str, Any]:
    """Return figures of the fastest pass; τ and the seconds per token are of all passes."""
    best = min(answers, key=lambda each: each["seconds"] / each["counters"][TOKENS])
    counters, seconds = best["counters"], best["seconds"]
    counted: Counter[str] = sum((Counter(each["counters"]) for each in answers), Counter())
    return {
        "tokens_per_second": counters[TOKENS] / seconds,
        "step_ms": seconds / counters[STEPS] * 1e3,
        "drafting_ms": counters[DRAFTING] / counters[STEPS] * 1e-6,
        "tau": acceptance_length(counted),
        "tau_imposed": expected,
        "tokens_per_step": counters[TOKENS] / counters[STEPS] / batch,
        "device_bytes": counters[DEVICE],
        "steps": counters[STEPS],
        "batch": batch,
        **{clock: [each[clock] / each["counters"][TOKENS] for each in answers] for clock in CLOCKS},
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a row per engine and batch. τ is of all passes, per tree; tokens per step, of a
    request, are of the fastest pass, as times are. × vLLM's time per token is the median of the
    passes, each over vLLM's of the same number; in brackets by CPU time."""
    rows = [["batch", "engine", "tokens/s", "× vLLM (CPU)", "τ", "tokens per step", "ms per step"]]
    rows[0] += ["drafting", "rest / vLLM's step", "GPU GB over vLLM's"]
    for name, each in results.items():
        plain = results.get(f"{PLAIN}, batch {each['batch']}")
        rest = each["step_ms"] - each["drafting_ms"]
        speed, verify, memory, tau = "–", "–", "–", f"{each['tau']:.2f}"
        if each["tau_imposed"] is not None:
            tau += f" ({each['tau_imposed']:.2f} imposed)"
        if plain is not None:
            ratios = [median(map(truediv, plain[clock], each[clock])) for clock in CLOCKS]
            speed = "{:.2f} ({:.2f})".format(*ratios)
            verify = f"{rest / plain['step_ms']:.2f}"
            if plain["device_bytes"]:
                memory = f"{(each['device_bytes'] - plain['device_bytes']) / 1e9:.2f}"
        rows.append(
            [
                *(str(each["batch"]), name.rpartition(", batch")[0]),
                *(f"{each['tokens_per_second']:.0f}", speed, tau),
                *(f"{each['tokens_per_step']:.2f}", f"{each['step_ms']:.2f}"),
                *(f"{each['drafting_ms'] / each['step_ms']:.0%}", verify, memory),
            ]
        )
    return markdown_table(rows)


def main(
    model: Annotated[
        str | None, typer.Option(help=f"{', '.join(MODELS)}, or {PAIR}; without a GPU: tiny.")
    ] = None,
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,2,4,8,16,32,64,128,256",
    nodes: Annotated[str, typer.Option(help="N of SpecBlock.")] = "12,24,60",
    chains: Annotated[str, typer.Option(help="Tokens of the chains.")] = "3,5",
    tau: Annotated[float, typer.Option(help="Imposed, of the tree of 60 nodes.")] = 4.41,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 2048,
    tokens: Annotated[int, typer.Option(min=32, help="Generated per request.")] = 256,
    repeat: Annotated[int, typer.Option(min=1, help="Passes.")] = 3,
    only: Annotated[str | None, typer.Option(help="Parts of engines' names; a; b.")] = None,
    engine: Annotated[str, typer.Option(help="More arguments of LLM, of all, as JSON.")] = "{}",
    out: Annotated[
        Path | None, typer.Option(help="JSON of the results (default: by the model's name).")
    ] = None,
) -> None:
    """Measure every engine at every batch, print a table."""
    gpu = torch.cuda.is_available()
    model = model or ("llama-8b" if gpu else "tiny")
    if model not in (*MODELS, PAIR):
        raise SystemExit(f"--model is {model!r}, but must be one of {', '.join(MODELS)}, {PAIR}.")
    path = out or MEASURED / f"end_to_end_{model}.json"
    slack = 2 * max(numbers(nodes, "--nodes")) + 2 * BLOCK
    length = context + tokens + slack
    with made(model, length, tau) as place:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(place.target)
        settings = {
            "model": model,
            "device": device_name(torch.device("cuda" if gpu else "cpu")),
            "dtype": "bfloat16" if gpu else "float32",
            "tau": tau,
            "alpha": place.best,
            "context": context,
            "tokens": tokens,
            "repeat": repeat,
            "engine": json.loads(engine),
        }
        store, failed = ResultsStore(path, settings), []
        found = engines(place, numbers(nodes, "--nodes"), numbers(chains, "--chains"), gpu)
        for batch in numbers(batches, "--batches"):
            prompts = prompts_of(model, config.vocab_size, context, batch)
            arguments = shared_arguments(place.target, settings["dtype"], length, batch)
            arguments |= place.engine | {
                # Windows are of decode steps. Hybrids refuse it.
                "enable_prefix_caching": config.model_type != "lfm2",
                "enforce_eager": not gpu,
                # Every request's tree in one step, or the scheduler would cut them.
                "max_num_batched_tokens": max(8192, batch * (slack // 2 + 1)),
                **settings["engine"],
            }
            wanted = {f"{name}, batch {batch}": keys for name, keys in chosen(found, only).items()}
            for group in [[key] for key in wanted] if gpu else [[*wanted]]:
                if all(key in store for key in group):
                    continue
                print(f"{'; '.join(group)} …", flush=True)
                asked = {key: arguments | {"speculative_config": wanted[key]} for key in group}
                job = {"prompts": prompts, "max_tokens": tokens}
                try:
                    answers = run(asked, job, repeat, path.with_suffix(""))
                except EngineFailed as error:
                    print(error)
                    failed += group
                    continue
                for key in group:
                    store.add(key, summary(answers[key], batch, expected_tau(place, wanted[key])))
    print(f"\n{settings}\n\n{table(store.results)}\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
