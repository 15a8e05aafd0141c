"""Tensor-parallel ranks of one engine: what each of them drafts, step by step."""

from __future__ import annotations

import os
from typing import Any

ADAPT = {
    "learning": {"policy": "always", "actions": "all", "every": 2, "lr": 1e-3},
    "watching": {"policy": "watch"},
}
"""Keys `adapt` of the engines whose ranks are compared."""
WANTED = {"always": ("swaps", 3), "watch": ("recorded_requests", 6)}
"""What each policy has to have done, and how often: swaps on every rank, records on one."""


class DraftRecorder:
    """Methods that vLLM adds to its workers."""

    model_runner: Any

    def record_drafts(self) -> None:
        speculator = self.model_runner.speculator
        propose, self.drafts = speculator.propose, []

        def noting(*args: Any, **kwargs: Any) -> Any:
            tokens = propose(*args, **kwargs)
            parent = speculator.tree_states.parent[args[0].idx_mapping]
            self.drafts.append([tokens.tolist(), parent.tolist(), self.counted("swaps")])
            return tokens

        speculator.propose = noting

    def recorded_drafts(self) -> tuple[list[Any], int]:
        """Return tokens, parents and versions taken of each step, and all accepted nodes."""
        counts = self.model_runner.speculator.counters.as_dict()
        return self.drafts, counts["accepted_nodes", 1]

    def counted(self, name: str) -> int:
        """Return one of the recorder's counts on this rank; default: 0."""
        counts = self.model_runner.speculator.recorder.counts()
        return counts.get((f"adapt_{name}", 0), 0)


def arguments(ranks: int) -> dict[str, Any]:
    """Return the arguments of `LLM` for so many ranks of this machine."""
    if ranks == 1:
        return {"distributed_executor_backend": "uni"}
    # Bound by itself, vLLM wants a NUMA node for every rank.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": ranks,
        "worker_extension_cls": f"{DraftRecorder.__module__}.{DraftRecorder.__name__}",
    }


def lacking(llm: Any, policy: str | None) -> str | None:
    """Return what a trainer of this policy has not done often enough; None: nothing."""
    if policy is None:
        return None
    name, least = WANTED[policy]
    counts = llm.collective_rpc("counted", args=(name,))
    reached = min(counts) if name == "swaps" else max(counts)
    return None if reached >= least else f"{name}: {counts} on the ranks, not {least}"


def require(llm: Any, policy: str | None, compared: int) -> None:
    """End this process unless all ranks drafted the same, and a fifth of `compared` tokens."""
    (first, accepted), *others = llm.collective_rpc("recorded_drafts")
    versions = first[-1][2]
    if any(other != first for other, _ in others):
        raise SystemExit("The ranks drafted different trees, or took versions at other steps.")
    if trouble := lacking(llm, policy):
        raise SystemExit(f"This tested little: {trouble}.")
    if accepted * 5 < compared:
        raise SystemExit(f"This tested little: {accepted} drafts of {compared} were accepted.")
    if versions and policy != "always":
        raise SystemExit(f"The ranks took {versions} versions without a trainer.")
