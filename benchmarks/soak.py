"""Mixed traffic against `vllm serve`: answers held against plain vLLM's, and flat memory.

    python benchmarks/soak.py [--phase "whole trees"] [--minutes 60] [--requests 2000]

Two servers of the example pair in float32, one with SpecBlock's trees merged with n-gram ones, take
turns over windows of the same requests: chats and completions, streams, clients that leave, greedy
and seeded, penalties, grammars, long prompts in chunks, shared beginnings, several answers, wrong
requests; with a cache so small that requests are preempted. Each phase has servers of its own.
They take 6 GB.

Prints a line per window, and the first requests whose replies differ with both replies. Exit status
1 if anything differs, a server ends, a request stays in it, memory grows by more than 3 % after the
first quarter, or nothing was preempted, cut, found in the prefix cache or accepted.
"""

from __future__ import annotations

import asyncio
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
from lib.options import known
from lib.pair import held_out
from lib.results_store import MEASURED, ROOT, ResultsStore, markdown_table
from lib.server import Server, ServerEnded
from lib.soak_replies import Reply, ask_all, difference
from lib.soak_traffic import COMPLETIONS, MAX_MODEL_LEN, Call, Traffic

PAIR = "examples/tiny_pair"
MODEL = f"{PAIR}/target"
PHASES: dict[str, dict[str, Any]] = {
    # Whole trees of 12 requests take 204 tokens: more than a step has, so some wait.
    "whole trees": {"enable_adaptive_verification": False},
    "adaptive": {},
}
"""Keys of `speculative_config` beside the method and the drafters."""
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
_MUST_HAPPEN = ("preemptions", "prefix_hit_tokens", "accepted_nodes")
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass
class Findings:
    """The findings of a phase, so far.

    Attributes:
        finished, cut, refused: replies that came whole, whose client left, that were errors.
        failures: errors other than differences, a sentence each.
        memory: MiB per window, of each server's two parts.
        seconds: that each server answered for.
        counters: `COUNTED`, of each server, since it started.
    """

    requests: int = 0
    windows: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    cut: int = 0
    refused: int = 0
    compared_tokens: int = 0
    different: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)

    def growth(self, name: str) -> float | None:
        """Return the growth of a server's memory after its warm-up; None: too few windows."""
        known = [sum(parts.values()) for parts in self.memory.get(name, ())]
        if len(known) < JUDGED:
            return None
        first, *later = known[int(WARM_UP * len(known)) :]
        return max(later) / first - 1

    def wrong(self) -> list[str]:
        """Return why the phase failed, a sentence each."""
        said = [*self.failures]
        if self.different:
            said.append(f"{self.different} replies are not plain vLLM's.")
        grown = self.growth("drafts")
        if grown is not None and grown > FLAT:
            said.append(f"Memory grew by {grown:.1%} after its warm-up.")
        counters = self.counters.get("drafts", {})
        seen = {name: counters.get(name, 0) for name in _MUST_HAPPEN} | {"cut requests": self.cut}
        return said + [
            f"There were no {name.replace('_', ' ')}: this tested little."
            for name, count in seen.items()
            if not count
        ]

    def as_json(self) -> dict[str, Any]:
        grown = {f"{name}_memory_growth": self.growth(name) for name in ("plain", "drafts")}
        return asdict(self) | grown | {"wrong": self.wrong()}


def start(name: str, speculative: dict[str, Any] | None, folder: Path) -> Server:
    """Start a server; speculative: None for plain vLLM."""
    arguments = [MODEL, "--enforce-eager", "--disable-uvicorn-access-log"]
    arguments += [part for flag in FLAGS.items() for part in flag]
    if speculative is not None:
        arguments += ["--speculative-config", json.dumps(speculative)]
    return Server(arguments, folder / f"{name}.log", ENV, ROOT)


def ask_window(
    found: Findings, servers: dict[str, Server], calls: Sequence[Call], clients: int
) -> None:
    """Send the same requests to both servers, one after the other, and compare the replies."""
    replies: dict[str, list[Reply]] = {}
    for name, server in servers.items():
        began = time.monotonic()
        asked = [call.patient() for call in calls] if name == "plain" else calls
        replies[name] = asyncio.run(ask_all(server.address, asked, clients))
        found.seconds[name] += time.monotonic() - began
        server.require()
        metrics = idle_metrics(server)
        held = {key: metrics[key] for key in _IDLE if metrics[key]}
        if held:
            found.failures.append(
                f"After window {found.windows} no request runs, but {name} has {held}."
            )
        found.counters[name] = {key: int(metrics.get(of, 0)) for key, of in COUNTED.items()}
        memory = {part: round(mib, 1) for part, mib in server.resident().items()}
        found.memory.setdefault(name, []).append(memory)
    for call, ours, plain in zip(calls, replies["drafts"], replies["plain"]):
        found.kinds.update(call.kinds)
        found.cut += ours.left
        found.refused += call.refused
        found.finished += not ours.left and not call.refused
        found.compared_tokens += sum(len(choice.tokens) for choice in ours.choices.values())
        said = difference(call, ours, plain)
        found.different += said is not None
        if said is not None and len(found.differences) < KEPT_DIFFERENCES:
            found.differences.append(difference_record(servers, call, said, ours, plain))
    found.requests += len(calls)
    found.windows += 1


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


def difference_record(
    servers: dict[str, Server], call: Call, said: str, ours: Reply, plain: Reply
) -> dict[str, Any]:
    """Return a difference as JSON's types, with how each server answers the request alone."""
    found: dict[str, Any] = {"says": said}
    for name, server in servers.items():
        (reply,) = asyncio.run(ask_all(server.address, [call.patient()], 1))
        found[f"{name}_alone"] = difference(call.patient(), reply, plain) or "the same"
    body = call.body.decode() if isinstance(call.body, bytes) else call.body
    return found | asdict(call) | {"body": body, "ours": asdict(ours), "plain": asdict(plain)}


def report(name: str, found: Findings) -> None:
    """Print a line after a window of a phase."""
    drafts, memory = found.counters["drafts"], found.memory["drafts"][-1]
    print(
        f"{name}, window {found.windows}: {found.requests} requests, {found.finished} finished, "
        f"{found.cut} cut, {found.refused} refused, {found.different} different; "
        f"{drafts['preemptions']} preemptions, {drafts['accepted_nodes']} nodes accepted, "
        f"{memory['server']:.0f} + {memory['engine']:.0f} MiB",
        flush=True,
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    head = ["phase", "requests", "finished", "cut", "refused", "different", "tokens compared"]
    rows = [[*head, "preemptions", "prefix hits", "nodes accepted", "memory", "wrong"]]
    whole = ("requests", "finished", "cut", "refused", "different", "compared_tokens")
    for name, each in results.items():
        counters, growth = each["counters"]["drafts"], each["drafts_memory_growth"]
        hits = counters["prefix_hit_tokens"] / max(1, counters["prompt_tokens"])
        cells = [*(each[key] for key in whole), counters["preemptions"]]
        rows.append([name, *(f"{cell:,}" for cell in cells), f"{hits:.0%}"])
        rows[-1] += [f"{counters['accepted_nodes']:,}"]
        rows[-1] += ["too short" if growth is None else f"{growth:+.1%}", str(len(each["wrong"]))]
    return markdown_table(rows)


def main(
    phase: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Of each phase, at least.")] = 60,
    requests: Annotated[int, typer.Option(min=1, help="Of each phase, at least.")] = 2_000,
    clients: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 16,
    window: Annotated[int, typer.Option(min=1, help="Requests of one turn.")] = 100,
    nodes: Annotated[int, typer.Option(min=1, help="Of a tree.")] = 16,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for soak.json and logs.")] = MEASURED / "soak",
) -> None:
    """Serve, ask, compare, print a table."""
    phases = known("phase", phase, PHASES)
    traffic = Traffic(seed, MODEL, ROOT / MODEL / "tokenizer.json", held_out())
    settings = {"seed": seed, "clients": clients, "window": window, "nodes": nodes}
    store = ResultsStore(out / "soak.json", settings)
    drafts = {
        "method": "specblock",
        "model": f"{PAIR}/drafter",
        "num_speculative_tokens": nodes,
        "second_drafter": {"kind": "ngram"},
        "draft_policy": "merge",
    }
    for name in phases:
        found, folder = Findings(), out / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            servers = {}
            for each, speculative in (("plain", None), ("drafts", drafts | PHASES[name])):
                servers[each] = start(each, speculative, folder)
                stack.callback(servers[each].close)
            for server in servers.values():
                server.wait()
            began = time.monotonic()
            while time.monotonic() - began < 60 * minutes or found.requests < requests:
                calls = [traffic.call(f"{found.windows}.{index}") for index in range(window)]
                try:
                    ask_window(found, servers, calls, clients)
                except ServerEnded as error:
                    found.failures.append(f"In window {found.windows} a server ended. {error}")
                    break
                report(name, found)
                store.add(name, found.as_json())
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
