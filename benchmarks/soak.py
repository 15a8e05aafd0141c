"""Mixed traffic against `vllm serve`: answers held against plain vLLM's, and flat memory.

    python benchmarks/soak.py [--phase "whole trees"] [--minutes 60] [--requests 2000]

Two servers of the example pair in float32, one with SpecBlock's trees merged with n-gram ones, take
turns over windows of the same requests: chats and completions, streams, clients that leave, greedy
and seeded, penalties, grammars, long prompts in chunks, shared beginnings, several answers, wrong
requests; with a cache so small that requests are preempted. Each phase has servers of its own.
They take 6 GB. "LoRA" asks two random adapters.

Prints a table per window, and the first requests whose replies differ with both replies. Exit
status 1 if anything differs, a server ends, a request stays in it, memory grows by more than 3 %
after the first quarter, or nothing was preempted, cut, found in the prefix cache or accepted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from lib.adapters import write_adapter
from lib.options import known
from lib.pair import held_out
from lib.results_store import MEASURED, ROOT, ResultsStore, markdown_table
from lib.server import Server, ServerEnded
from lib.soak_replies import Reply, ask_all, difference
from lib.soak_traffic import COMPLETIONS, MAX_MODEL_LEN, Call, Traffic

PAIR = "examples/tiny_pair"
MODEL = f"{PAIR}/target"
SERVERS = PLAIN, DRAFTS = "plain", "drafts"
CLIENTS, WINDOW = 16, 100
"""Requests under way at a time, and of one turn."""
TREES = {
    "method": "specblock",
    "model": f"{PAIR}/drafter",
    "num_speculative_tokens": 16,
    "second_drafter": {"kind": "ngram"},
    "draft_policy": "merge",
}
WHOLE = {"enable_adaptive_verification": False}
# Memory of records is filled within the warm-up.
LEARNS = {"adapt": {"policy": "always", "memory": 16}}
PHASES: dict[str, dict[str, Any]] = {
    # Whole trees of 12 requests take 204 tokens: more than a step has, so some wait.
    "whole trees, learning": TREES | WHOLE | LEARNS,
    "adaptive": TREES,
    "LoRA": TREES | WHOLE | {"num_speculative_tokens": 8},
}
"""`speculative_config` of each."""
ADAPTERS = "one", "two"
FLAGS = {
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--max-num-seqs": "12",
    "--max-num-batched-tokens": "160",  # long prompts come in chunks
    "--block-size": "32",
    "--num-gpu-blocks-override": "36",  # room for some 4 of 12 requests: they are preempted
    "--gpu-memory-utilization": "0.1",
    "--kv-cache-memory-bytes": str(128 << 20),
}
ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # Two servers take turns: either may have every core, and none is to spin.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Both are for engines within one process, as tests have them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": None,
    "TRITON_INTERPRET": None,
}
WARM_UP = 0.25
"""Share of the windows after which memory has to be flat."""
JUDGED = 24
"""Least number of windows to judge memory by: allocators have settled by then."""
FLAT = 0.03
KEPT_DIFFERENCES = 20
COUNTED = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "verified_nodes": "vllm:specblock_tree_nodes_total",
    "accepted_nodes": "vllm:spec_decode_num_accepted_tokens_total",
}
_MUST_HAPPEN = ("preemptions", "prefix_hit_tokens", "accepted_nodes", "cut_requests")
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass
class Findings:
    """The findings of a phase, so far.

    Attributes:
        counts: requests, and of these the finished, the cut (by their client), the refused and the
            different ones; compared tokens.
        kinds: requests by what was drawn for them.
        failures: errors other than differences, a sentence each.
        memory: MiB of each server per window.
        counters: `COUNTED`, of each server, since it started.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    differences: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SERVERS})
    counters: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in SERVERS}
    )

    def growth(self, name: str) -> float | None:
        """Return the growth of a server's memory after its warm-up; None: too few windows."""
        known = self.memory[name]
        if len(known) < JUDGED:
            return None
        first, *later = known[int(WARM_UP * len(known)) :]
        return max(later) / first - 1

    def wrong(self) -> list[str]:
        """Return why the phase failed, a sentence each."""
        said, grown = [*self.failures], self.growth(DRAFTS)
        if self.counts["different"]:
            said.append(f"{self.counts['different']} replies are not plain vLLM's.")
        if grown is not None and grown > FLAT:
            said.append(f"Memory grew by {grown:.1%} after its warm-up.")
        seen = self.counters[DRAFTS] | Counter(cut_requests=self.counts["cut"])
        return said + [
            f"There were no {name.replace('_', ' ')}: this tested little."
            for name in _MUST_HAPPEN
            if not seen[name]
        ]

    def as_json(self) -> dict[str, Any]:
        grown = {f"{name}_memory_growth": self.growth(name) for name in SERVERS}
        return vars(self) | grown | {"wrong": self.wrong()}


def target_arguments(phase: str, folder: Path) -> list[str]:
    """Return a phase's target, and its flags for `vllm serve`; folder: for files of its own."""
    arguments = [MODEL, *(part for flag in FLAGS.items() for part in flag)]
    if phase == "LoRA":
        made = [f"{name}={write_adapter(folder / name, at)}" for at, name in enumerate(ADAPTERS)]
        arguments += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
        arguments += ["--lora-modules", *made]
    return arguments


def start(name: str, target: list[str], speculative: dict[str, Any] | None, folder: Path) -> Server:
    """Start a server; speculative: None for plain vLLM."""
    arguments = [*target, "--enforce-eager", "--disable-uvicorn-access-log"]
    if speculative is not None:
        arguments += ["--speculative-config", json.dumps(speculative)]
    return Server(arguments, folder / f"{name}.log", ENV, ROOT)


def ask_window(found: Findings, servers: dict[str, Server], calls: Sequence[Call]) -> None:
    """Send the same requests to both servers, one after the other, and compare the replies."""
    replies: dict[str, list[Reply]] = {}
    for name, server in servers.items():
        asked = [call.patient() for call in calls] if name == PLAIN else calls
        replies[name] = asyncio.run(ask_all(server.address, asked, CLIENTS))
        server.require()
        metrics = idle_metrics(server)
        found.memory[name].append(round(server.resident(), 1))
        held = {key: metrics[key] for key in _IDLE if metrics[key]}
        if held:
            window = len(found.memory[name])
            found.failures.append(f"After window {window} no request runs, but {name} has {held}.")
        found.counters[name] = Counter(
            {key: int(metrics.get(of, 0)) for key, of in COUNTED.items()}
        )
    for call, ours, plain in zip(calls, replies[DRAFTS], replies[PLAIN]):
        said = difference(call, ours, plain)
        found.kinds.update(call.kinds)
        found.counts += Counter(
            requests=1,
            finished=not ours.left and not call.refused,
            cut=ours.left,
            refused=call.refused,
            different=said is not None,
            compared_tokens=sum(len(choice.tokens) for choice in ours.choices.values()),
        )
        if said is not None and len(found.differences) < KEPT_DIFFERENCES:
            body = call.body.decode() if isinstance(call.body, bytes) else call.body
            both = {"ours": asdict(ours), "plain": asdict(plain)}
            found.differences.append({"says": said} | asdict(call) | {"body": body} | both)


def idle_metrics(server: Server) -> dict[str, float]:
    """Return the metrics once all requests have ended. Gauges change in a step only: send one."""
    step = Call("idle", (), COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 1})
    for _ in range(5):
        asyncio.run(ask_all(server.address, [step], 1))
        metrics = server.metrics()
        if not any(metrics[key] for key in _IDLE):
            break
        time.sleep(1)
    return metrics


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a row per phase."""
    whole = ["requests", "finished", "cut", "refused", "different", "compared_tokens"]
    count = ["preemptions", "accepted_nodes"]
    rows = [["phase", *(name.replace("_", " ") for name in whole + count)]]
    rows[0] += ["prefix hits", "memory", "wrong"]
    for name, each in results.items():
        counters, growth = each["counters"][DRAFTS], each[f"{DRAFTS}_memory_growth"]
        cells = [each["counts"].get(key, 0) for key in whole]
        cells += [counters.get(key, 0) for key in count]
        hits = counters.get("prefix_hit_tokens", 0) / max(1, counters.get("prompt_tokens", 0))
        rows.append([name, *(f"{cell:,}" for cell in cells), f"{hits:.0%}"])
        rows[-1] += ["too short" if growth is None else f"{growth:+.1%}", str(len(each["wrong"]))]
    return markdown_table(rows)


def main(
    phase: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Of each phase, at least.")] = 60,
    requests: Annotated[int, typer.Option(min=1, help="Of each phase, at least.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for soak.json and logs.")] = MEASURED / "soak",
) -> None:
    """Serve, ask, compare, print a table."""
    phases = known("phase", phase, PHASES)
    store = ResultsStore(out / "soak.json", {"seed": seed})
    for name in phases:
        found, folder = Findings(), (out / name.replace(" ", "_")).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Beside adapters, plain vLLM on a CPU gives a request of the target alone wrong tokens.
        models = list(ADAPTERS) if name == "LoRA" else [MODEL]
        traffic = Traffic(seed, models, ROOT / MODEL / "tokenizer.json", held_out())
        target = target_arguments(name, folder)
        with ExitStack() as stack:
            servers = {}
            for each, speculative in zip(SERVERS, (None, PHASES[name])):
                servers[each] = start(each, target, speculative, folder)
                stack.callback(servers[each].close)
            for server in servers.values():
                server.wait()
            began = time.monotonic()
            for number in itertools.count():
                if time.monotonic() - began > 60 * minutes and number * WINDOW >= requests:
                    break
                calls = [traffic.call(f"{number}.{index}") for index in range(WINDOW)]
                try:
                    ask_window(found, servers, calls)
                except ServerEnded as error:
                    found.failures.append(f"In window {number} a server ended. {error}")
                    break
                store.add(name, found.as_json())
                print(f"window {number + 1}\n{table({name: store.results[name]})}", flush=True)
        store.add(name, found.as_json())
        for each in found.differences[:3]:
            print(json.dumps(each, indent=1, ensure_ascii=False))
    results = {name: store.results[name] for name in phases}
    print(table(results))
    wrong = [f"{name}: {said}" for name, each in results.items() for said in each["wrong"]]
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
