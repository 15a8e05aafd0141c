"""Cost of adaptation to serving: recording requests, and swapping the drafter's weights.

    python benchmarks/adaptation_steps.py [--model llama-8b] [--batch 1]

Two engines of one process take turns, one without `adapt` and one that watches: steps in which
every request decodes are timed. Then the watching one gets its own weights again and again, as a
trainer would offer them. With random weights (every `--model` but the example pair) nothing is
accepted, so a step records one row of each request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from end_to_end import PAIR, made, prompts_of
from lib.in_process import runner_of
from lib.results_store import MEASURED, ResultsStore, markdown_table
from lib.spec_configs import alone, specblock
from steady_state import decode_steps

from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.versions import StagedVersion
from vllm_specblock.bench.process import shared_arguments
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.refresh import HEADS

WATCH = {"adapt": {"policy": "watch"}}
CONTEXT, TOKENS, PAIRS = 512, 128, 11
"""Tokens of a prompt of random ids and of an answer; passes of each engine."""
GOALS = {"watch": 1.03, "heads": 1.5, "all": 1.5}
"""Steps that watch, over those that do not; the longest step of a swap, over the median one."""


class Again:
    """A link whose trainer always offers the same weights, `every` steps after the last swap.

    Attributes:
        step: number of the running step, set by the caller; −1: offer nothing.
        around: steps of all swaps, from the offer to the end.
        seconds: of each swap.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], every: int) -> None:
        whole = not all(name.startswith(HEADS) for name in tensors)
        self.tensors, self.action = tensors, Action.FULL if whole else Action.HEADS
        self.every, self.step, self._offered = every, 0, 0
        self.counts: dict[str, int] = {}
        self.around: set[int] = set()
        self.seconds: list[float] = []

    def staged(self) -> StagedVersion | None:
        if self.step < 0 or self.step < self._offered + self.every:
            return None
        self._offered = self.step
        return StagedVersion(len(self.seconds) + 1, 0, self.action, self.tensors)

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        if self.step >= 0:
            self.around.update(range(self._offered, self.step + 1))
            self.seconds.append(seconds)
            self._offered = self.step

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        raise RuntimeError(f"the drafter's own weights were refused: {reason}")


def swaps(llm: Any, drafter: Path, prompts: Sequence[Any], what: str) -> dict:
    """Return the cost of swaps to the steps around them; what: `heads` or `all` weights."""
    from vllm_specblock.adapt.serving.swaps import Swaps

    speculator = runner_of(llm).speculator
    weights = dict(checkpoint.load(drafter, torch.float32).named_parameters())
    kept = {n: each.detach() for n, each in weights.items() if what == "all" or n.startswith(HEADS)}
    link = Again(kept, every=8)
    steps: list[float] = []
    ran = 0

    def count(counts: bool) -> None:
        nonlocal ran
        link.step = ran if counts else -1
        ran += counts

    recorder = speculator.recorder
    recorder.swaps = Swaps(link, speculator.draft_policy.drafters[0].model)
    try:
        while len(link.seconds) < 8 and ran < 4096:
            found = decode_steps(llm, prompts, TOKENS, f"{what}-{ran}", count)
            steps += [seconds for seconds, _ in found]
    finally:
        recorder.swaps = None
    quiet = median(each for step, each in enumerate(steps) if step not in link.around)
    return {
        "swaps": len(link.seconds),
        "step_ms": 1e3 * quiet,
        "ratio": max(steps[step] for step in link.around) / quiet,
        "copy_ms": 1e3 * median(link.seconds),
    }


def watching(off: Any, watch: Any, prompts: Sequence[Any]) -> dict:
    """Return seconds of both engines' passes, which take turns and draft the same."""
    found: dict[str, list[float]] = {"off": [], "watch": []}
    for number in range(-1, PAIRS):  # the first is a warm-up
        order = [("off", off), ("watch", watch)]
        for name, llm in order if number % 2 else reversed(order):
            steps = decode_steps(llm, prompts, TOKENS, f"{name}{number}")
            if number >= 0:
                found[name].append(sum(seconds for seconds, _ in steps))
    ratios = sorted(b / a for a, b in zip(found["off"], found["watch"]))
    return {"ratio": median(ratios), "least": ratios[0], "most": ratios[-1], **found}


def main(
    model: Annotated[str, typer.Option(help="The example pair, or one of end_to_end.py.")] = PAIR,
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    nodes: Annotated[int, typer.Option(help="Of every tree.")] = 60,
    dtype: Annotated[str, typer.Option(help="Of target and drafter.")] = "bfloat16",
    engine: Annotated[str, typer.Option(help="JSON, added to both engines.")] = "{}",
    out: Annotated[Path, typer.Option(help="JSON file.")] = MEASURED / "adaptation_steps.json",
) -> None:
    """Measure both, and print a table with the goals."""
    from vllm import LLM

    settings = {"model": model, "batch": batch, "nodes": nodes, "dtype": dtype, "engine": engine}
    store = ResultsStore(out, settings)
    length = CONTEXT + TOKENS + nodes + 1
    with made(model, length, 1.0) as place:
        tree = alone(specblock(place.drafter), nodes)
        arguments = shared_arguments(place.target, dtype, length, batch)
        arguments |= {"disable_log_stats": True} | place.engine | json.loads(engine)
        off = LLM(**arguments, speculative_config=dict(tree))
        watch = LLM(**arguments, speculative_config=tree | WATCH)
        vocabulary = off.llm_engine.model_config.get_vocab_size()
        prompts = prompts_of(model, vocabulary, CONTEXT, batch)
        store.add("watch", watching(off, watch, prompts))
        for what in ("heads", "all"):
            store.add(what, swaps(watch, place.drafter, prompts, what))
    rows = [["", "× a step", "goal", "a swap's copy"]]
    for name, found in store.results.items():
        copied = f"{found['copy_ms']:.2f} ms" if "copy_ms" in found else "–"
        rows.append([name, f"{found['ratio']:.3f}", f"≤ {GOALS[name]}", copied])
    print(markdown_table(rows))


if __name__ == "__main__":
    typer.run(main)
