"""Engines of every kind on the emulated GPU: the tokens are plain vLLM's."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Any

import pytest

# Read by vLLM when it is imported.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["TRITON_F32_DEFAULT"] = "ieee"
# The steps that vLLM times at the start have a short context, and each runs once.
os.environ["VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"] = "16"

from support.engines import FULL_GRAPHS, ROOT, Engine, Output, make_engine
from vllm import SamplingParams
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

TOKENS = int(os.environ.get("CHECK_TOKENS", 8))
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\nclass Stack:\n",
    "import os\n\nclass ",
    "for i in range(",
)
SAMPLING = {
    "float32": ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}, {"presence_penalty": 0.3}),
    "bfloat16": ({"logprobs": 4},) * 3,
}
TIE = 0.125
"""Nats: two steps of bfloat16 at logits of 8 to 16. Tree attention rounds in another order."""

# Warm-up runs of vLLM's own sizes take minutes in an interpreter.
SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "kv_cache_memory_bytes": 16 << 20,
    "kernel_config": {"enable_flashinfer_autotune": False, "enable_jit_warmup": False},
}
SIZES = {"cudagraph_capture_sizes": [9, 27]}
GRAPHS = {"enforce_eager": False, "compilation_config": FULL_GRAPHS | SIZES}
# vLLM's default but for Inductor, whose kernels are compiled.
PIECEWISE = {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"} | SIZES
EAGLE3 = {"model": str(ROOT / "examples/two_heads/eagle3")}
NGRAM = {"kind": "ngram"}
PROFILED = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.02}
ADAPTIVE = {"enable_adaptive_verification": True}
MERGED = {"second_drafter": NGRAM, "draft_policy": "merge"}
BOTH = ["float32", "bfloat16"]

ENGINES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "eager": (BOTH, {}, {}),
    "graphs": (BOTH, {}, GRAPHS),
    "piecewise": (BOTH, {}, {"enforce_eager": False, "compilation_config": PIECEWISE}),
    "warmed": (BOTH[:1], {}, GRAPHS | {"kernel_config": {"enable_flashinfer_autotune": False}}),
    "profiled": (BOTH[:1], {}, GRAPHS | PROFILED),
    "adaptive": (BOTH, ADAPTIVE, GRAPHS),
    "n-gram": (BOTH[:1], {**NGRAM, "model": None}, GRAPHS),
    "EAGLE-3": (BOTH, EAGLE3, GRAPHS),
    "merged": (BOTH[:1], MERGED, GRAPHS),
    "merged adaptive": (BOTH[1:], MERGED | {"second_drafter": EAGLE3, **ADAPTIVE}, GRAPHS),
    "routed": (BOTH, {"second_drafter": EAGLE3, "draft_policy": "route"}, GRAPHS),
    "routed lazily": (BOTH[:1], {"second_drafter": EAGLE3, "route": "lazy"}, GRAPHS),
    "fp8": (BOTH, {"quantization": "fp8"}, GRAPHS),
    "adapt watch": (BOTH[:1], {"adapt": {"policy": "watch"}}, GRAPHS),
    "adapt in the engine": (BOTH[:1], {"adapt": {"trainer": "engine"}}, GRAPHS),
}
"""By name: dtypes, keys of `speculative_config`, and arguments of the engine."""
CASES = [(name, dtype) for dtype in BOTH for name, each in ENGINES.items() if dtype in each[0]]


def answers(engine: Engine, dtype: str) -> list[Output]:
    encode = engine.llm.get_tokenizer().encode
    params = [
        SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS + i, **kind})
        for i, kind in enumerate(SAMPLING[dtype])
    ]
    return [each[0] for each in engine.generate([encode(text) for text in TEXTS], params)]


@cache
def plain(dtype: str) -> list[Output]:
    return answers(make_engine(None, dtype=dtype, **SMALL), dtype)


def equal_tokens(found: Output, wanted: Output, dtype: str) -> int:
    """Return how many tokens are equal: all, or in bfloat16 those before the first tie."""
    for place, (ours, theirs) in enumerate(zip(found.tokens, wanted.tokens, strict=True)):
        if ours != theirs:
            assert dtype == "bfloat16", (found.tokens, wanted.tokens)
            top = wanted.logprobs[place]
            assert top[theirs][0] - top[ours][0] <= TIE, (place, found.tokens, wanted.tokens)
            return place
    return len(wanted.tokens)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tokens_are_those_of_plain_vllm(name, dtype, monkeypatch):
    monkeypatch.setattr(adaptive_verification, "_PROFILE_REPLAYS", 1)
    _, speculative, changes = ENGINES[name]
    speculative = {"num_speculative_tokens": 8, **speculative}
    engine = make_engine(speculative, **(SMALL | {"dtype": dtype} | changes))
    pairs = zip(answers(engine, dtype), plain(dtype), strict=True)
    equal = sum(equal_tokens(*pair, dtype) for pair in pairs)
    counters = engine.speculator.counters.as_dict()
    print(f"TOKENS {name} {dtype}: {equal} equal", json.dumps(counters))
    assert sum(value for key, value in counters.items() if key.startswith("verified"))
    # They replace vLLM's copies to a device, in the whole process.
    assert "vllm.v1.worker.cpu_worker" not in sys.modules
    assert "vllm_specblock.engine.cpu.host_budget" not in sys.modules
