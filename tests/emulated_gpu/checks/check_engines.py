"""Engines of every kind on the emulated GPU: the tokens are plain vLLM's."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from families import FAMILIES, VOCAB
from family_engine import draw_weights
from support.adapters import LORA, in_turn
from support.engines import (
    EAGLE3,
    FULL_GRAPHS,
    TARGET,
    Engine,
    Output,
    make_engine,
    prompts,
    record_preemptions,
)
from support.learned import LEARNERS, write_learned, write_peagle
from support.matrix import no_pause
from transformers import AutoTokenizer
from vllm import SamplingParams, __version__
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.sampling_params import StructuredOutputsParams

from vllm_specblock.feedback import controller

TOKENS = int(os.environ.get("CHECK_TOKENS", 8))
RECORD = os.environ.get("CHECK_RECORD")
"""A JSON file that gets how many tokens were compared, by release, engine and dtype."""
ADAPTERS = Path(mkdtemp())
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\nclass Stack:\n",
    "import os\n\nclass ",
    "for i in range(",
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    {"presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 6, "extra_args": {"specblock_draft": False}},
    {"structured_outputs": StructuredOutputsParams(regex="(ab|ba|[0-9]){100,400}")},
    {"temperature": 0.7, "top_k": 20, "seed": 7, "frequency_penalty": 0.6},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 8},
)
"""Of float32's requests; those of other dtypes are greedy."""
TIE = {"float32": 0.0, "float16": 2**-6, "bfloat16": 2**-3}
"""Nats: two steps of a dtype at logits of 8 to 16. Tree attention rounds in another order."""

# Warm-up runs of vLLM's own sizes take minutes in an interpreter.
SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 80,
    "kv_cache_memory_bytes": 16 << 20,
}
SIZES = {"cudagraph_capture_sizes": [9, 36]}
GRAPHS = {"enforce_eager": False, "compilation_config": FULL_GRAPHS | SIZES}
# vLLM's default but for Inductor, whose kernels are compiled.
PIECEWISE = {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"} | SIZES
NGRAM = {"kind": "ngram"}
PROFILED = {
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.02,
    # One request of more tokens than the model allows, in the memory profile.
    "max_num_batched_tokens": 272,
    "max_num_seqs": 1,
}
ADAPTIVE = {"enable_adaptive_verification": True}
MERGED = {"second_drafter": NGRAM, "draft_policy": "merge"}
CROWDED = {"num_gpu_blocks_override": 12}
FP8_CACHE = {"kv_cache_dtype": "fp8"}
BOTH = ["float32", "bfloat16"]
EACH = ["float32", "float16", "bfloat16"]

ENGINES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "eager": (BOTH, {}, {}),
    "graphs": (EACH, {}, GRAPHS),
    "piecewise": (BOTH, {}, {"enforce_eager": False, "compilation_config": PIECEWISE}),
    "warmed": (BOTH[:1], {}, GRAPHS | {"kernel_config": {"enable_flashinfer_autotune": False}}),
    "profiled": (BOTH[:1], {}, GRAPHS | PROFILED),
    "adaptive": (EACH, ADAPTIVE, GRAPHS),
    "adaptive piecewise": (
        BOTH[:1],
        ADAPTIVE,
        {"enforce_eager": False, "compilation_config": PIECEWISE},
    ),
    "n-gram": (BOTH[:1], {**NGRAM, "model": None}, GRAPHS),
    "EAGLE-3": (EACH, EAGLE3, GRAPHS),
    "merged": (EACH[:2], MERGED, GRAPHS),
    "merged adaptive": (BOTH[1:], MERGED | {"second_drafter": EAGLE3, **ADAPTIVE}, GRAPHS),
    "routed": (BOTH, {"second_drafter": EAGLE3, "draft_policy": "route"}, GRAPHS),
    # vLLM's kernels take 16-bit weights only, and the interpreter adds bfloat16 as integers.
    "LoRA eager": (EACH[1:2], {**NGRAM, "model": None, "earlier_tokens": 0}, LORA),
    "LoRA": (EACH[1:2], {}, GRAPHS | LORA),
    "fp8": (BOTH, {"quantization": "fp8"}, GRAPHS),
    "fp8 cache": (BOTH[1:], {}, GRAPHS | FP8_CACHE),
    "fp8 cache eager": (BOTH[1:], {**NGRAM, "model": None, "earlier_tokens": 0}, FP8_CACHE),
    "DFlash": (BOTH[:1], {"model": "dflash"}, GRAPHS),
    "JetSpec": (BOTH[:1], {"model": "jetspec"}, GRAPHS),
    "DSpark and P-EAGLE": (
        BOTH[:1],
        {"model": "dspark", "second_drafter": {"model": "peagle"}, "draft_policy": "merge"},
        GRAPHS,
    ),
    "crowded": (BOTH[:1], {}, GRAPHS | CROWDED),
    "crowded eager": (BOTH[:1], ADAPTIVE, CROWDED),
    "crowded routed": (
        BOTH[:1],
        {"second_drafter": EAGLE3, "draft_policy": "route"},
        GRAPHS | CROWDED,
    ),
    "adapt watch": (BOTH[:1], {"adapt": {"policy": "watch"}}, GRAPHS),
    "adapt in a folder": (BOTH[:1], {"adapt": {"trainer": "folder"}}, GRAPHS),
}
"""By name: dtypes, keys of `speculative_config`, and arguments of the engine."""
CASES = [(name, dtype) for dtype in EACH for name, each in ENGINES.items() if dtype in each[0]]


def asked(tokenizer) -> list[list[int]]:
    return [*map(tokenizer.encode, TEXTS), *prompts(count=2 * len(SAMPLING) - len(TEXTS))]


def requests(engine: Engine, dtype: str) -> tuple[list[Any], ...]:
    """Short texts, and made-up ones of up to 200 tokens, which come in chunks beside other rows."""
    texts = asked(engine.llm.get_tokenizer())
    kinds: Any = SAMPLING * 2
    if dtype != "float32":  # by log-probabilities an answer may leave plain vLLM's
        kinds = ({"logprobs": None if engine.speculator else 4},) * len(texts)
    common = {"temperature": 0.0, "ignore_eos": True}
    params = [
        SamplingParams(**{**common, "max_tokens": TOKENS + i, **kind})
        for i, kind in enumerate(kinds)
    ]
    lora = engine.runner.lora_config is not None
    return texts, params, in_turn(ADAPTERS, len(texts)) if lora else [None] * len(texts)


def answers(engine: Engine, dtype: str) -> list[Output]:
    return [each[0] for each in engine.generate(*requests(engine, dtype))]


def answers_beside_aborted(engine: Engine, given: tuple[list[Any], ...]) -> list[list[int]]:
    """Return tokens of requests beside others; each third one is aborted in the fourth step."""
    llm, done = engine.llm.llm_engine, {}
    for i, (text, params, adapter) in enumerate(zip(*given, strict=True)):
        llm.add_request(f"{i}", {"prompt_token_ids": text}, params, lora_request=adapter)
    step = 0
    while llm.has_unfinished_requests():
        step += 1
        if step == 4:
            llm.abort_request([f"{i}" for i in range(0, len(given[0]), 3)])
        for answer in llm.step():
            if answer.finished and answer.outputs[0].finish_reason != "abort":
                done[int(answer.request_id.split("-")[0])] = list(answer.outputs[0].token_ids)
    return [done[i] for i in sorted(done) if i % 3]  # a short one may end before it is aborted


@cache
def plain(dtype: str, *options: tuple[str, Any]) -> list[Output]:
    return answers(make_engine(None, dtype=dtype, **SMALL, **dict(options)), dtype)


@dataclass
class Compared:
    """Equal tokens up to an answer's first tie, answers that leave plain vLLM's at a tie or
    elsewhere, and requests that were preempted."""

    tokens: int = 0
    ties: int = 0
    different: int = 0
    preempted: int = 0

    def add(self, found: list[int], wanted: Output, dtype: str) -> None:
        assert len(found) == len(wanted.tokens)
        for place, (ours, theirs) in enumerate(zip(found, wanted.tokens)):
            if ours != theirs:
                top = {} if wanted.logprobs is None else wanted.logprobs[place]
                tied = ours in top and top[theirs][0] - top[ours][0] <= TIE[dtype]
                self.ties, self.different = self.ties + tied, self.different + (not tied)
                print(f"DIFFERENT from {place} on, {tied=}:", found, wanted.tokens)
                return
            self.tokens += 1

    def record(self, name: str, dtype: str) -> None:
        if RECORD:
            path = Path(RECORD)
            kept = json.loads(path.read_text()) if path.exists() else {}
            kept.setdefault(__version__, {})[f"{name}, {dtype}"] = asdict(self)
            path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tokens_are_those_of_plain_vllm(name, dtype, tmp_path, monkeypatch):
    """Once on an empty cache, once with prefix hits, and once beside aborted requests.

    Where that adapts, half of the proposals are of one block.
    """
    monkeypatch.setattr(controller, "LONGEST", 2 * controller.TRIAL)
    _, speculative, changes = ENGINES[name]
    speculative = {"num_speculative_tokens": 8, **speculative}
    if speculative.get("model") in LEARNERS:
        texts = asked(AutoTokenizer.from_pretrained(TARGET))
        said = [one.tokens for one in plain("float32")]
        folder = write_learned(tmp_path / "learned", speculative["model"], texts, said)
        speculative["model"] = str(folder)
    if speculative.get("second_drafter") == {"model": "peagle"}:
        speculative["second_drafter"] = {"model": str(write_peagle(tmp_path / "second"))}
    if speculative.get("adapt", {}).get("trainer") == "folder":
        speculative["adapt"] = {"trainer": str(tmp_path / "requests")}
    wanted = plain(dtype, *((LORA | FP8_CACHE).items() & changes.items()))
    engine = make_engine(speculative, **(SMALL | {"dtype": dtype} | changes))
    preempted, compared = record_preemptions(engine), Compared()
    for _ in range(2):
        for found, each in zip(answers(engine, dtype), wanted, strict=True):
            compared.add(found.tokens, each, dtype)
    kept = [each for i, each in enumerate(wanted) if i % 3]
    found = answers_beside_aborted(engine, requests(engine, dtype))
    for tokens, each in zip(found, kept, strict=True):
        compared.add(tokens, each, dtype)
    compared.preempted = len(preempted)
    counters = engine.speculator.counters.as_dict()
    print(f"TOKENS {name} {dtype}: {compared}", counters)
    compared.record(name, dtype)
    assert not compared.different and compared.tokens
    assert preempted or "crowded" not in name or TOKENS < 20
    assert sum(n for (name, _), n in counters.items() if name == "verified_nodes")
    # They replace vLLM's copies to a device, in the whole process.
    assert "vllm.v1.worker.cpu_worker" not in sys.modules
    assert "vllm_specblock.cpu.host_budget" not in sys.modules


# ---- targets with other layers, of random weights ----


def layers(ours: str, attention: str) -> dict[str, Any]:
    kinds = [ours, attention, ours]
    return {"num_hidden_layers": 3, "layer_types": kinds, "layers_block_type": kinds}


LATENT, DELTA = "latent attention", "Gated DeltaNet"
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mamba-2": ("Granite 4 hybrid", "float32", layers("mamba", "attention")),
    "short convolution": ("LFM2", "float32", layers("conv", "full_attention")),
    # Of head sizes that FlashAttention takes, without experts.
    # Gates of attention take a kernel in the compiled part.
    DELTA: (
        "Qwen3.5",
        "float16",
        {**layers("linear_attention", "full_attention"), "attn_output_gate": False},
    ),
    LATENT: (
        "DeepSeek V3, Kimi K2",
        "float16",
        {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 2,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
}
"""Layers → a family of `families.yaml`, its dtype, and what its config has otherwise here."""
# As with Inductor, vLLM's layers run in plain torch: Dynamo cannot trace interpreted kernels.
COMPILED = {"compilation_config": PIECEWISE | {"custom_ops": ["none"]}}
MODES: dict[str, dict[str, Any]] = {"eager": {}, "graphs": {"enforce_eager": False, **COMPILED}}


@pytest.fixture(scope="module", params=OTHERS)
def other(request, tmp_path_factory):
    """A kind of layers, arguments of an engine, requests, and plain vLLM's answers."""
    name, dtype, changes = OTHERS[request.param]
    family, folder = FAMILIES[name], tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(family.config | changes))
    arguments = {
        **SMALL,
        "dtype": dtype,
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": 4 << 20,
        "enable_prefix_caching": False,
        # By Triton kernels: an H100's default is FlashInfer's.
        "additional_config": {"gdn_prefill_backend": "triton"},
        **family.engine,
    }
    draw, texts = random.Random(1), []
    for length, words in ((12, 2), (44, 3), (11, 2), (1, 1)):
        book = [[draw.randrange(5, VOCAB) for _ in range(3)] for _ in range(words)]
        texts.append([token for _ in range(length) for token in draw.choice(book)][:length])
    common = {"ignore_eos": True, "detokenize": False}
    heat, common["logprobs"] = (0.0, 4) if dtype == "float16" else (0.3, None)
    params = [
        SamplingParams(temperature=heat * (i % 2), seed=i, max_tokens=TOKENS + i, **common)
        for i in range(len(texts))
    ]
    params[1].extra_args = {"specblock_draft": False}
    with pytest.MonkeyPatch.context() as patch:
        # Layers add little to the embedding, so that answers repeat themselves.
        patch.setattr(DummyModelLoader, "load_weights", lambda _, x, __: draw_weights(x, 0.02))
        answers = make_engine(None, **arguments).generate(texts, params)
        yield request.param, arguments, (texts, params), [each for (each,) in answers]


def difference(found: Output, wanted: Output) -> float:
    """Return how far apart log-probabilities are; a wrong state may well give the same tokens."""
    texts = zip(found.tokens, wanted.tokens, found.logprobs or (), wanted.logprobs or ())
    equal = itertools.takewhile(lambda each: each[0] == each[1], texts)
    return max((abs(ours[t][0] - theirs[t][0]) for t, _, ours, theirs in equal), default=0.0)


@pytest.mark.parametrize("mode", MODES)
def test_other_layers_give_the_tokens_of_plain_vllm(other, mode, monkeypatch):
    kind, arguments, requests, wanted = other
    drafts = {"num_speculative_tokens": 6, "model": None, **NGRAM, "earlier_tokens": 0}
    adaptive = ADAPTIVE if mode == "graphs" and kind == LATENT else {}
    # A request takes three blocks, and from 65 tokens on four.
    crowded = {"num_gpu_blocks_override": 7} if mode == "graphs" and kind == DELTA else {}
    engine = make_engine(drafts | adaptive, **(arguments | MODES[mode] | crowded))
    preempted = record_preemptions(engine)
    if adaptive:  # what steps take is chance
        no_pause(engine, monkeypatch)
    graphs = engine.speculator.vllm_config.compilation_config.cudagraph_mode.name
    # No full graph may contain recurrent layers.
    captured = "FULL_AND_PIECEWISE" if kind == LATENT else "PIECEWISE"
    assert graphs == {"eager": "NONE", "graphs": captured}[mode]
    compared, off = Compared(), 0.0
    for (found,), each in zip(engine.generate(*requests), wanted, strict=True):
        compared.add(found.tokens, each, arguments["dtype"])
        off = max(off, difference(found, each))
    if crowded:
        left = answers_beside_aborted(engine, (*requests, [None] * len(wanted)))
        for tokens, each in zip(left, wanted[1:3], strict=True):
            compared.add(tokens, each, arguments["dtype"])
    compared.preempted = len(preempted)
    counters = engine.speculator.counters.as_dict()
    print(f"TOKENS {kind}, {mode}: {compared}, {off} nats", counters)
    compared.record(f"{kind}, {mode}", arguments["dtype"])
    assert not compared.different and off <= TIE[arguments["dtype"]]
    assert preempted or not crowded or TOKENS < 24
    accepted = sum(n for (name, _), n in counters.items() if name == "accepted_nodes")
    assert accepted > 5 or TOKENS < 20
