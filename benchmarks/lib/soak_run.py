"""A phase of a soak: windows of requests, to plain vLLM and to an engine with drafts in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.results_store import ROOT
from lib.server import Server, ServerEnded
from lib.soak_client import Reply, ask_all
from lib.soak_compare import difference, record
from lib.soak_phases import MODEL, Phase, prompts_text, write_adapters
from lib.soak_traffic import COMPLETIONS, Call, Traffic

WARM_UP = 0.25
"""Share of the windows after which memory has to be flat."""
JUDGED = 24
"""Windows that it takes to say so: allocators have then seen what there is to see."""
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
ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # Two servers take turns: either may have every core, and none is to spin.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Both are for engines within one process, as tests have them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": None,
    "TRITON_INTERPRET": None,
}
_MUST_HAPPEN = ("preemptions", "prefix_hit_tokens", "accepted_nodes")
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass
class Findings:
    """What a phase found, so far.

    Attributes:
        kinds: requests by kind.
        finished, cut, refused: replies that came whole, that did not since the client left or
            had them aborted, that were errors.
        different: replies that were not plain vLLM's.
        differences: the first of them.
        failures: what else was wrong, a sentence each.
        memory: MiB per window, of each server's two parts.
        seconds: that each server answered for.
        counters: `COUNTED`, of each server, since it started.
    """

    requests: int = 0
    windows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    cut: int = 0
    refused: int = 0
    compared_tokens: int = 0
    different: int = 0
    differences: list[dict[str, object]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)

    def growth(self, name: str) -> float | None:
        """By how much a server's memory was larger after its warm-up than at the end of it, as a
        share; None: too few windows to tell."""
        known = [sum(parts.values()) for parts in self.memory[name]]
        if len(known) < JUDGED:
            return None
        first, *later = known[int(WARM_UP * len(known)) :]
        return max(later) / first - 1

    def wrong(self) -> list[str]:
        """Why the phase did not hold, a sentence each."""
        said = [*self.failures]
        if self.different:
            said.append(f"{self.different} replies are not plain vLLM's.")
        grown = self.growth("drafts")
        if grown is not None and grown > FLAT:
            said.append(f"Memory grew by {grown:.1%} after its warm-up.")
        counters = self.counters.get("drafts", {})
        seen = {name: counters.get(name, 0) for name in _MUST_HAPPEN} | {"cut requests": self.cut}
        for name, count in seen.items():
            if not count:
                said.append(f"There were no {name.replace('_', ' ')}: this tested little.")
        return said


def run_phase(
    phase: Phase,
    nodes: int,
    seed: int,
    clients: int,
    window: int,
    enough: Callable[[Findings, float], bool],
    folder: Path,
    seen: Callable[[Findings], None],
) -> Findings:
    """Windows of requests until it is enough.

    Args:
        clients: requests under way at a time.
        window: requests of one.
        enough: told of the findings, and of seconds since both servers answered.
        folder: takes logs and adapters.
        seen: called after every window.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if phase.adapters:
        write_adapters(folder)
    tokenizer = ROOT / MODEL / "tokenizer.json"
    traffic = Traffic(seed, phase.models, tokenizer, prompts_text(), phase.without)
    found = Findings()
    with ExitStack() as stack:
        servers = {}
        for name, size in (("plain", None), ("drafts", nodes)):
            arguments = phase.arguments(folder, size)
            servers[name] = Server(arguments, folder / f"{name}.log", ENV, ROOT)
            stack.callback(servers[name].close)
            found.memory[name], found.seconds[name] = [], 0.0
        for server in servers.values():
            server.wait()
        began = time.monotonic()
        while not enough(found, time.monotonic() - began):
            try:
                _window(found, servers, traffic.window(found.windows, window), clients)
            except ServerEnded as error:
                found.failures.append(f"In window {found.windows} a server ended. {error}")
                break
            seen(found)
    return found


def _window(
    found: Findings, servers: dict[str, Server], calls: Sequence[Call], clients: int
) -> None:
    replies: dict[str, list[Reply]] = {}
    for name, server in servers.items():
        began = time.monotonic()
        asked = [call.patient() for call in calls] if name == "plain" else calls
        replies[name] = asyncio.run(ask_all(server.address, asked, clients))
        found.seconds[name] += time.monotonic() - began
        server.require()
        metrics = _idle_metrics(server)
        held = {key: metrics[key] for key in _IDLE if metrics[key]}
        if held:
            found.failures.append(
                f"After window {found.windows} no request runs, but {name} has {held}."
            )
        found.counters[name] = {key: int(metrics.get(of, 0)) for key, of in COUNTED.items()}
        found.memory[name].append({k: round(v, 1) for k, v in server.resident().items()})
    for call, ours, plain in zip(calls, replies["drafts"], replies["plain"]):
        for kind in call.kinds:
            found.kinds[kind] = found.kinds.get(kind, 0) + 1
        found.cut += ours.cut
        found.refused += call.refused
        found.finished += not ours.cut and not call.refused
        found.compared_tokens += sum(len(choice.tokens) for choice in ours.choices.values())
        said = difference(call, ours, plain)
        if said is not None:
            found.different += 1
            if len(found.differences) < KEPT_DIFFERENCES:
                known = record(call, said, ours, plain) | _again(servers, call, plain)
                found.differences.append(known)
    found.requests += len(calls)
    found.windows += 1


def _idle_metrics(server: Server) -> dict[str, float]:
    """Once aborts have come through. Gauges change with a step only: one more request takes one."""
    step = Call("idle", (), COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 1})
    for _ in range(5):
        asyncio.run(ask_all(server.address, [step], 1))
        metrics = server.metrics()
        if not any(metrics[key] for key in _IDLE):
            break
        time.sleep(1)
    return metrics


def _again(servers: dict[str, Server], call: Call, plain: Reply) -> dict[str, Any]:
    """What both servers say to it alone, held against what plain vLLM said among others."""
    alone = {}
    for name, server in servers.items():
        (reply,) = asyncio.run(ask_all(server.address, [call.patient()], 1))
        alone[f"{name}_alone"] = difference(call.patient(), reply, plain) or "the same"
    return alone
