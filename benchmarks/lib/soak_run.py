"""A phase of a soak: windows of requests, to plain vLLM and to an engine with drafts in turn."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lib.results_store import ROOT
from lib.server import Server, ServerEnded
from lib.soak_client import Reply, ask_all
from lib.soak_compare import difference
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
    """The findings of a phase, so far.

    Attributes:
        kinds: requests by kind.
        finished, cut, refused: replies that came whole, whose client left, that were errors.
        different: replies that were not plain vLLM's.
        differences: the first of them.
        failures: other errors, a sentence each.
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
        known = [sum(parts.values()) for parts in self.memory[name]]
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
        for name, count in seen.items():
            if not count:
                said.append(f"There were no {name.replace('_', ' ')}: this tested little.")
        return said

    def as_json(self) -> dict[str, Any]:
        grown = {f"{name}_memory_growth": self.growth(name) for name in self.memory}
        return asdict(self) | grown | {"wrong": self.wrong()}


def start(name: str, speculative: dict[str, Any] | None, folder: Path) -> Server:
    """Start a server; speculative: None for plain vLLM."""
    arguments = [MODEL, "--enforce-eager", "--disable-uvicorn-access-log"]
    arguments += [part for flag in FLAGS.items() for part in flag]
    if speculative is not None:
        arguments += ["--speculative-config", json.dumps(speculative)]
    return Server(arguments, folder / f"{name}.log", ENV, ROOT)


def run_phase(
    name: str,
    nodes: int,
    seed: int,
    clients: int,
    window: int,
    enough: Callable[[Findings, float], bool],
    folder: Path,
    seen: Callable[[Findings], None],
) -> Findings:
    """Send windows of requests until there are enough.

    Args:
        name: of `PHASES`.
        nodes: N.
        clients: requests under way at a time.
        window: requests of one.
        enough: called with the findings, and seconds since both servers answered.
        folder: for logs.
        seen: called after every window.
    """
    sys.path.insert(0, str(ROOT / PAIR))
    import corpus

    folder.mkdir(parents=True, exist_ok=True)
    traffic = Traffic(seed, MODEL, ROOT / MODEL / "tokenizer.json", corpus.load().held_out)
    drafts = {
        "method": "specblock",
        "model": f"{PAIR}/drafter",
        "num_speculative_tokens": nodes,
        "second_drafter": {"kind": "ngram"},
        "draft_policy": "merge",
        **PHASES[name],
    }
    found = Findings(memory={"plain": [], "drafts": []})
    with ExitStack() as stack:
        servers = {}
        for each, speculative in (("plain", None), ("drafts", drafts)):
            servers[each] = start(each, speculative, folder)
            stack.callback(servers[each].close)
        for server in servers.values():
            server.wait()
        began = time.monotonic()
        while not enough(found, time.monotonic() - began):
            calls = [traffic.call(f"{found.windows}.{index}") for index in range(window)]
            try:
                _window(found, servers, calls, clients)
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
        found.kinds.update(call.kinds)
        found.cut += ours.left
        found.refused += call.refused
        found.finished += not ours.left and not call.refused
        found.compared_tokens += sum(len(choice.tokens) for choice in ours.choices.values())
        said = difference(call, ours, plain)
        if said is not None:
            found.different += 1
            if len(found.differences) < KEPT_DIFFERENCES:
                found.differences.append(_record(servers, call, said, ours, plain))
    found.requests += len(calls)
    found.windows += 1


def _idle_metrics(server: Server) -> dict[str, float]:
    """Return the metrics once all requests have ended. Gauges change in a step only: send one."""
    step = Call("idle", (), COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 1})
    for _ in range(5):
        asyncio.run(ask_all(server.address, [step], 1))
        metrics = server.metrics()
        if not any(metrics[key] for key in _IDLE):
            break
        time.sleep(1)
    return metrics


def _record(
    servers: dict[str, Server], call: Call, said: str, ours: Reply, plain: Reply
) -> dict[str, Any]:
    """Return a difference as JSON's types, with how each server answers the request alone."""
    found: dict[str, Any] = {"says": said}
    for name, server in servers.items():
        (reply,) = asyncio.run(ask_all(server.address, [call.patient()], 1))
        found[f"{name}_alone"] = difference(call.patient(), reply, plain) or "the same"
    body = call.body.decode() if isinstance(call.body, bytes) else call.body
    return found | asdict(call) | {"body": body, "ours": asdict(ours), "plain": asdict(plain)}
