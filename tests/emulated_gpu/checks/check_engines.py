"""Engines of every kind on the emulated GPU: the tokens are plain vLLM's."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Read by vLLM when it is imported.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["TRITON_F32_DEFAULT"] = "ieee"
# The steps that vLLM times at the start have a short context, and each runs once.
os.environ["VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"] = "16"

import torch
from support import dflash
from support.engines import (
    FULL_GRAPHS,
    ROOT,
    TARGET,
    Engine,
    Output,
    make_engine,
    prompts,
    record_preemptions,
)
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from vllm_specblock.train.target.features import load_target

TOKENS = int(os.environ.get("CHECK_TOKENS", 8))
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\nclass Stack:\n",
    "import os\n\nclass ",
    "for i in range(",
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    {"presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 6},
    {"structured_outputs": StructuredOutputsParams(regex="(ab|ba|[0-9]){100,400}")},
    {"temperature": 0.7, "top_k": 20, "seed": 7, "frequency_penalty": 0.6},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 8},
)
"""Of float32's requests; bfloat16's are greedy."""
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
PROFILED = {
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.02,
    # One request of more tokens than the model allows, in the memory profile.
    "max_num_batched_tokens": 272,
    "max_num_seqs": 1,
}
ADAPTIVE = {"enable_adaptive_verification": True}
LEARNING = {"policy": "always", "every": 2, "lr": 1e-3}
MERGED = {"second_drafter": NGRAM, "draft_policy": "merge"}
CROWDED = {"num_gpu_blocks_override": 12}
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
    "fp8": (BOTH, {"quantization": "fp8"}, GRAPHS),
    "DFlash": (BOTH[:1], {"model": "dflash"}, GRAPHS),
    "JetSpec": (BOTH[:1], {"model": "jetspec"}, GRAPHS),
    "crowded": (BOTH[:1], {}, GRAPHS | CROWDED),
    "crowded eager": (BOTH[:1], ADAPTIVE, CROWDED),
    "crowded routed": (
        BOTH[:1],
        {"second_drafter": EAGLE3, "draft_policy": "route"},
        GRAPHS | CROWDED,
    ),
    "adapt watch": (BOTH[:1], {"adapt": {"policy": "watch"}}, GRAPHS),
    "adapt in the engine": (BOTH[:1], {"adapt": LEARNING | {"trainer": "engine"}}, GRAPHS),
    "adapt in a folder": (BOTH[:1], {"adapt": {"trainer": "folder"}}, GRAPHS),
}
"""By name: dtypes, keys of `speculative_config`, and arguments of the engine."""
CASES = [(name, dtype) for dtype in BOTH for name, each in ENGINES.items() if dtype in each[0]]


def requests(engine: Engine, dtype: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """Short texts, and made-up ones of up to 90 tokens, which come in chunks beside other rows."""
    encode = engine.llm.get_tokenizer().encode
    texts = [*map(encode, TEXTS), *prompts(count=5)]
    kinds = SAMPLING if dtype == "float32" else ({"logprobs": 4},) * len(texts)
    common = {"temperature": 0.0, "ignore_eos": True}
    params = [
        SamplingParams(**{**common, "max_tokens": TOKENS + i, **kind})
        for i, kind in enumerate(kinds)
    ]
    return texts, params


def answers(engine: Engine, dtype: str) -> list[Output]:
    return [each[0] for each in engine.generate(*requests(engine, dtype))]


def answers_beside_aborted(engine: Engine, dtype: str) -> list[list[int]]:
    """Return tokens of requests beside others; each third one is aborted in the fourth step."""
    llm, done = engine.llm.llm_engine, {}
    for i, (text, params) in enumerate(zip(*requests(engine, dtype), strict=True)):
        llm.add_request(f"{i}", {"prompt_token_ids": text}, params)
    step = 0
    while llm.has_unfinished_requests():
        step += 1
        if step == 4:
            llm.abort_request([f"{i}" for i in range(0, len(SAMPLING), 3)])
        for answer in llm.step():
            if answer.finished and answer.outputs[0].finish_reason != "abort":
                done[int(answer.request_id.split("-")[0])] = list(answer.outputs[0].token_ids)
    return [done[i] for i in sorted(done) if i % 3]  # a short one may end before it is aborted


@cache
def plain(dtype: str) -> list[Output]:
    return answers(make_engine(None, dtype=dtype, **SMALL), dtype)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> dict[str, Path]:
    """Folders of drafters that learned a little of plain vLLM's answers, by kind."""
    target = load_target(TARGET, "fp32", torch.device("cpu"))
    encode, folders = make_tokenizer().encode, {}
    asked = [*map(encode, TEXTS), *prompts(count=5)]
    texts = [torch.tensor([*ask, *one.tokens]) for ask, one in zip(asked, plain("float32"))]
    with torch.no_grad():
        states = [target(text[None], output_hidden_states=True).hidden_states for text in texts]
    embedding = target.get_input_embeddings().weight.detach()
    for kind, raw in dflash.FOR_TINY_PAIR.items():
        model = dflash.make_model(raw, std=0.05)
        model.share_head(target.get_output_embeddings().weight)
        features = [torch.cat([of[i][0] for i in model.config.layer_ids], dim=-1) for of in states]
        firsts = [len(ask) for ask in asked]
        dflash.learn(model, texts, features, firsts, embedding, causal=kind == "jetspec")
        folders[kind] = dflash.write(tmp_path_factory.mktemp(kind) / "drafter", model, raw)
    return folders


def make_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


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
def test_tokens_are_those_of_plain_vllm(name, dtype, request, tmp_path, monkeypatch):
    """Once on an empty cache, once with prefix hits, and, in float32, beside aborted requests."""
    monkeypatch.setattr(adaptive_verification, "_PROFILE_REPLAYS", 1)
    _, speculative, changes = ENGINES[name]
    speculative = {"num_speculative_tokens": 8, **speculative}
    if speculative.get("model") in dflash.FOR_TINY_PAIR:
        speculative["model"] = str(request.getfixturevalue("learned")[speculative["model"]])
    if speculative.get("adapt", {}).get("trainer") == "folder":
        speculative["adapt"] = {"trainer": str(tmp_path / "requests")}
    wanted = plain(dtype)
    engine = make_engine(speculative, **(SMALL | {"dtype": dtype} | changes))
    preempted, equal = record_preemptions(engine), 0
    for _ in range(2):
        pairs = zip(answers(engine, dtype), wanted, strict=True)
        equal += sum(equal_tokens(*pair, dtype) for pair in pairs)
    if dtype == "float32":
        kept = [answer.tokens for i, answer in enumerate(wanted) if i % 3]
        assert answers_beside_aborted(engine, dtype) == kept
        equal += sum(map(len, kept))
    counters = engine.speculator.counters.as_dict()
    print(f"TOKENS {name} {dtype}: {equal} equal, {len(preempted)} preempted", json.dumps(counters))
    assert preempted or "crowded" not in name or TOKENS < 20
    assert sum(value for key, value in counters.items() if key.startswith("verified"))
    # They replace vLLM's copies to a device, in the whole process.
    assert "vllm.v1.worker.cpu_worker" not in sys.modules
    assert "vllm_specblock.cpu.host_budget" not in sys.modules
