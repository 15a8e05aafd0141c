"""What is served under fire: an engine with drafts, and plain vLLM with the same flags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.lora_adapters import RANK, write_adapter
from lib.results_store import ROOT
from lib.soak_traffic import MAX_MODEL_LEN

PAIR = "examples/tiny_pair"
MODEL = f"{PAIR}/target"
MAX_NUM_SEQS = 12
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {"one": LINEAR, "two": ["q_proj", "v_proj", "embed_tokens", "lm_head"]}
"""Modules of each adapter."""

FLAGS = {
    "--dtype": "float32",
    "--max-model-len": str(MAX_MODEL_LEN),
    "--max-num-seqs": str(MAX_NUM_SEQS),
    "--block-size": "32",
    # Room for some 4 of 12 requests: they are preempted.
    "--num-gpu-blocks-override": "36",
    "--gpu-memory-utilization": "0.1",
    "--kv-cache-memory-bytes": str(128 << 20),
}


@dataclass(frozen=True)
class Phase:
    """One pair of servers.

    Attributes:
        speculative: beside the method and the drafters.
        batched: `max_num_batched_tokens`. Long prompts come in chunks.
        adapters: of LoRA.
    """

    speculative: dict[str, Any]
    batched: int = 160
    adapters: bool = False

    @property
    def without(self) -> set[str]:
        """Of `EXTRAS`: for log-probabilities of a prompt, vLLM 0.32 maps rows to adapters as it
        does for sampled tokens; beside other requests it ends with an error of sizes."""
        return {"log-probabilities of the prompt"} if self.adapters else set()

    @property
    def models(self) -> list[str]:
        return [MODEL, *ADAPTERS] if self.adapters else [MODEL]

    def arguments(self, folder: Path, nodes: int | None) -> list[str]:
        """Of `vllm serve`.

        Args:
            folder: of the adapters, which `write_adapters` made.
            nodes: of a tree; None: plain vLLM.
        """
        flags = {**FLAGS, "--max-num-batched-tokens": str(self.batched)}
        if self.adapters:
            # Beside requests with an adapter, vLLM's own kernels for CPUs give one that has none
            # what lies in the last slot: in plain vLLM that is an empty one.
            slots = len(ADAPTERS) + (nodes is None)
            flags |= {"--max-loras": str(slots), "--max-lora-rank": str(RANK)}
        found = [MODEL, *(part for flag in flags.items() for part in flag)]
        found += ["--enforce-eager", "--disable-uvicorn-access-log"]
        if self.adapters:
            found += ["--enable-lora", "--lora-modules"]
            found += [f"{name}={folder / name}" for name in ADAPTERS]
        if nodes is not None:
            drafts = {
                "method": "specblock",
                "model": f"{PAIR}/drafter",
                "num_speculative_tokens": nodes,
                "second_drafter": {"kind": "ngram"},
                "draft_policy": "merge",
                **self.speculative,
            }
            found += ["--speculative-config", json.dumps(drafts)]
        return found


PHASES = {
    # Whole trees of 12 requests take 204 tokens: more than a step has, so some wait.
    "whole trees": Phase({"enable_adaptive_verification": False}),
    "adaptive": Phase({}),
    # vLLM wants the trees of all requests to fit where adapters are.
    "LoRA": Phase({"enable_adaptive_verification": False}, batched=256, adapters=True),
}


def write_adapters(folder: Path) -> None:
    """Those of `ADAPTERS`, unless they are there."""
    for seed, (name, modules) in enumerate(ADAPTERS.items(), 1):
        if not (folder / name).exists():
            write_adapter(folder / name, seed, modules)


def prompts_text() -> list[str]:
    """What prompts are cut from: text that the example pair has not learned."""
    import sys

    sys.path.insert(0, str(ROOT / PAIR))
    import corpus

    return corpus.load().held_out
