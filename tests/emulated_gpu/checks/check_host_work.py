"""What the host gives the GPU in a decode step from CUDA graphs, counted: wants `--lazy`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from support.engines import EAGLE3, FULL_GRAPHS, Engine, make_engine, prompts
from vllm import SamplingParams

STEPS = 4
TREES = {"num_speculative_tokens": 60, "num_blocks": 2}
METHODS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "plain": (None, 1),
    "EAGLE-3 chain": ({"method": "eagle3", **EAGLE3, "num_speculative_tokens": 3}, 4),
    "SpecBlock": (TREES, 61),
}
"""`speculative_config`, and rows of a request in a step."""
EVENTS = ("record event", "wait for event", "host function")


def make(method: str) -> Engine:
    speculative, rows = METHODS[method]
    sizes = {"cudagraph_capture_sizes": [rows, 8 * rows]}
    return make_engine(
        speculative,
        max_model_len=256,
        enforce_eager=False,
        max_num_batched_tokens=max(64, 9 * rows),
        kv_cache_memory_bytes=64 << 20,
        compilation_config=FULL_GRAPHS | sizes,
    )


def count(engine: Engine, requests: int) -> dict[str, float]:
    """Return per step: graphs launched, their nodes, and what is launched or copied outside."""
    import _emulated_gpu  # wants torch's libraries to be loaded

    llm = engine.llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for i, text in enumerate(prompts(count=requests, shared=4)):
        llm.add_request(f"{i}", {"prompt_token_ids": text[:5]}, params)
    for _ in range(4):  # prompts, and steps of fewer requests
        llm.step()
    _emulated_gpu.note(True)
    for _ in range(STEPS):
        llm.step()
    noted = _emulated_gpu.noted()
    _emulated_gpu.note(False)
    llm.abort_request([f"{i}" for i in range(requests)])
    while llm.has_unfinished_requests():
        llm.step()
    in_graphs = [name for name in noted if name.startswith("graph: ")]
    outside = [name for name in noted if not name.startswith(("graph", *EVENTS))]
    counts = {"graphs": noted.count("graph"), "nodes": len(in_graphs), "outside": len(outside)}
    print(f"HOST WORK of {requests} requests:", json.dumps(Counter(in_graphs + outside)))
    return {name: number / STEPS for name, number in counts.items()}


@pytest.fixture(scope="module")
def counted() -> dict[str, list[dict[str, float]]]:
    found = {}
    for method in METHODS:
        engine = make(method)
        found[method] = [count(engine, requests) for requests in (1, 8)]
        print(f"HOST WORK of {method} in a step:", json.dumps(found[method]))
    return found


@pytest.mark.parametrize("batch", [0, 1], ids=["1 request", "8 requests"])
def test_the_host_gives_the_gpu_little_in_a_step(counted, batch):
    """Goals: 6 more than plain vLLM outside of graphs, and 80 nodes for commit and drafts."""
    plain, chain, trees = (counted[method][batch] for method in METHODS)
    assert trees["graphs"] == 2
    assert trees["nodes"] - plain["nodes"] <= 80
    assert trees["outside"] - plain["outside"] <= 6
    assert trees["outside"] < chain["outside"]
