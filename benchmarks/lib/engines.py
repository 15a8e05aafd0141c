"""Engines by name, as a user would serve them: ours by default, ours fixed, and vLLM's own."""

from __future__ import annotations

from vllm_specblock.bench.config import MethodSpec
from vllm_specblock.bench.methods import RUNNER

_TREES = {"ngram": "ngram", "specblock": "specblock", "eagle3": "eagle3", "merged": "merge-ngram"}
"""Our drafters, and the methods of `specblock bench` that they change."""
FIXED_NODES = (4, 12, 24)

SERVED = {
    # The methods of `specblock bench` verify every node; a server has our defaults.
    name: MethodSpec(base=base, speculative={"enable_adaptive_verification": None})
    for name, base in _TREES.items()
}
FIXED = {
    f"{name}-{nodes}": MethodSpec(base=base, speculative={"num_speculative_tokens": nodes})
    for name, base in _TREES.items()
    for nodes in FIXED_NODES
}
VLLM = {
    "vllm-ngram": MethodSpec(
        speculative={
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        },
        env={RUNNER: None},
    ),
    "vllm-suffix": MethodSpec(speculative={"method": "suffix"}, env={RUNNER: None}),
    "vllm-eagle3": MethodSpec(base="eagle3-chain"),
}
ENGINES = SERVED | FIXED | VLLM
