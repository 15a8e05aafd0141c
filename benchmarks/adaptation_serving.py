"""A stream that changes its domain, served by vLLM with a frozen drafter and with learning ones.

Engines take turns, a window of requests each. An engine without a turn is stopped with its trainer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib.in_process import ENV
from lib.results_store import ResultsStore, markdown_table
from lib.spec_configs import alone, specblock
from tqdm import tqdm

from vllm_specblock.bench.process import EngineProcess, end_all, job_of, shared_arguments
from vllm_specblock.engine.metrics.acceptance import REQUESTS, STEPS, TOKENS, acceptance_length

LEARNERS: dict[str, dict[str, Any] | None] = {
    "frozen": None,
    "gain": {"policy": "gain", "actions": "all"},
    "gain, heads": {"policy": "gain", "actions": "heads"},
    "paper": {"policy": "paper", "actions": "all"},
    "always": {"policy": "always", "actions": "all"},
}
"""`adapt` of each engine."""

WINDOW, BATCH, NODES = 16, 4, 12
"""Requests of a turn, and at a time; nodes of a tree."""
LONGEST = 512
"""Tokens of a prompt; longer ones are left out."""
PARTS = 4
"""Parts of each other domain in the table."""
COUNTER = "vllm:specblock_adapt_"


@dataclass(frozen=True)
class Serving:
    """Settings of all engines.

    Attributes:
        home: requests of the drafter's own domain; away: domains after it, and requests of each.
        pause: seconds after a learner's turn in which its trainer runs.
    """

    home: int
    away: tuple[tuple[str, int], ...]
    new_tokens: int
    dtype: str
    pause: float

    def arguments(self, drafter: Path, target: Path, learner: str) -> dict[str, Any]:
        """Of vLLM's `LLM`."""
        # Drafting is never paused: such steps are not recorded.
        speculative = alone(specblock(drafter, num_blocks=1), NODES)
        if (adapt := LEARNERS[learner]) is not None:
            speculative["adapt"] = adapt
        shared = shared_arguments(target, self.dtype, 1024, BATCH)
        return shared | {"speculative_config": speculative}


def serve(
    drafter: Path,
    target: Path,
    prompts: Sequence[list[int]],
    learners: Sequence[str],
    serving: Serving,
    out: Path,
) -> dict[str, list[dict[str, Any]]]:
    """Return each engine's answers, window by window; prompts: token ids, home first."""
    out.mkdir(parents=True, exist_ok=True)
    settings = asdict(serving) | {"drafter": drafter.name, "target": target.name}
    store = ResultsStore(out / "serving.json", settings)
    engines: list[EngineProcess] = []
    windows: dict[str, list[dict[str, Any]]] = {name: [] for name in learners}
    answers: dict[int, Any] = {}
    try:
        for name in learners:
            arguments = serving.arguments(drafter, target, name)
            engines.append(EngineProcess(name, arguments, ENV, out / f"{name}.log"))
            engines[-1].wait()
        firsts = range(0, len(prompts), WINDOW)
        for turn, first in enumerate(tqdm(firsts, "windows", unit="window")):
            part = list(prompts[first : first + WINDOW])
            start = turn % len(engines)
            for engine in [*engines[start:], *engines[:start]]:
                seeds = range(first, first + len(part))
                answer = engine.ask(job_of(part, serving.new_tokens, 0.0, seeds))
                ids = answer.pop("ids")
                same = answers.setdefault(first, ids)
                answer["tokens"] = sum(map(len, ids))
                answer["different"] = sum(a != b for a, b in zip(ids, same, strict=True))
                windows[engine.name].append(answer)
                if serving.pause and LEARNERS[engine.name] is not None:
                    engine.resume()
                    time.sleep(serving.pause)
                    engine.pause()
            for name in learners:
                store.add(name, windows[name])
    finally:
        end_all(engines)
    return windows


def parts(serving: Serving) -> dict[str, slice]:
    """Return the windows of home, without the first if it has more, and of the others' parts."""
    end = serving.home // WINDOW
    found = {"home": slice(min(1, end - 1), end)}
    for name, requests in serving.away:
        begin, end = end, end + requests // WINDOW
        edges = [begin + (end - begin) * part // PARTS for part in range(PARTS + 1)]
        found |= {f"{name} {n + 1}/{PARTS}": slice(*edges[n : n + 2]) for n in range(PARTS)}
    return found


def tables(windows: Mapping[str, Sequence[dict[str, Any]]], serving: Serving) -> str:
    """Return the figures of each part, and totals; the first engine is the base."""
    base = next(iter(windows.values()))
    rows = [["", *(f"{learner}: τ, speed" for learner in windows)]]
    for name, where in parts(serving).items():
        its, speed = tau(base[where]), rate(base[where])
        rows.append([name])
        for found in windows.values():
            mine, times = tau(found[where]), rate(found[where]) / speed
            rows[-1].append(f"{mine:.2f} ({100 * mine / its - 100:+.0f} %), {times:.2f} ×")
    totals = [["", "CPU s", "updates (heads, full)", "swaps", "returns", "other answers"]]
    for learner, found in windows.items():
        cpu, different = (sum(each[key] for each in found) for key in ("cpu", "different"))
        updates = [str(total(found, f"{COUNTER}updates_{arm}")) for arm in ("heads", "full")]
        counts = [str(total(found, COUNTER + each)) for each in ("swaps", "rollbacks")]
        totals.append([learner, f"{cpu:.0f}", ", ".join(updates), *counts, str(different)])
    return f"{markdown_table(rows)}\n{markdown_table(totals)}"


def total(windows: Sequence[dict[str, Any]], name: str) -> int:
    return sum(each["counters"].get(name, 0) for each in windows)


def tau(windows: Sequence[dict[str, Any]]) -> float:
    """τ of a part of the stream."""
    return acceptance_length({name: total(windows, name) for name in (TOKENS, REQUESTS, STEPS)})


def rate(windows: Sequence[dict[str, Any]]) -> float:
    return sum(each["tokens"] for each in windows) / sum(each["wall"] for each in windows)
