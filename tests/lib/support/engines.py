"""Engines, prompts and comparisons of the exactness tests."""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

ROOT = Path(__file__).resolve().parents[3]
TARGET = ROOT / "examples/tiny_pair/target"
DRAFTER = ROOT / "examples/tiny_pair/drafter"
MAX_MODEL_LEN = 512
FULL_GRAPHS: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
EMULATED: dict[str, Any] = {}
if os.environ.get("EMULATED_GPU") == "1":  # warm-up runs at vLLM's own sizes take minutes there
    FULL_GRAPHS["cudagraph_capture_sizes"] = [16, 64, 200]
    EMULATED = {
        "max_num_batched_tokens": 2 * MAX_MODEL_LEN,
        "kernel_config": {"enable_flashinfer_autotune": False, "enable_jit_warmup": False},
    }
EAGLE3 = {"model": str(ROOT / "examples/two_heads/eagle3")}
KINDS = {
    "SpecBlock": {},
    "n-gram": {"kind": "ngram", "model": None},
    "route": {"second_drafter": EAGLE3},
    "trie": {"second_drafter": {"kind": "ngram"}, "draft_policy": "merge", "skip_drafter": False},
}
"""Drafters whose steps are decided on the device, as a GPU wants it."""
MARKERS = {"reasoning_start_str": "class", "reasoning_end_str": "return self"}
"""The `reasoning_config` of a target that thinks."""
# An engine that is collected takes the process groups of all others along.
_ALIVE: list[Engine] = []
_SHARED: dict[str, Engine] = {}


@dataclass
class Output:
    """What one request gave, as far as a user can tell."""

    tokens: list[int]
    finish_reason: str | None
    stop_reason: Any
    text: str
    logprobs: list[dict[int, tuple[float, int]]] | None
    drafted: int = field(default=0, compare=False)
    """Draft tokens that vLLM scheduled, where an engine reports them."""


@dataclass
class Engine:
    """One vLLM engine in this process."""

    llm: LLM

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def runner(self):
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def speculator(self):
        return self.runner.speculator

    @property
    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name, of the newest engine."""
        return {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | list[SamplingParams],
        adapters: list[LoRARequest | None] | None = None,
    ) -> list[list[Output]]:
        """Outputs of every prompt, `n` each."""
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self.llm.generate(requests, params, use_tqdm=False, lora_request=adapters)
        return [[_output(each) for each in answer.outputs] for answer in answers]


def _output(raw) -> Output:
    logprobs = raw.logprobs and [
        {token: (entry.logprob, entry.rank) for token, entry in place.items()}
        for place in raw.logprobs
    ]
    metrics = getattr(raw, "spec_decode_metrics", None)
    drafted = metrics.num_draft_tokens if metrics else 0
    tokens = list(raw.token_ids)
    return Output(tokens, raw.finish_reason, raw.stop_reason, raw.text, logprobs, drafted)


def make_engine(speculative: dict[str, Any] | None, **changes: Any) -> Engine:
    """An engine on the example pair in float32; `speculative` adds to our request.

    Trees are of a fixed size unless it says otherwise: what a step takes is chance.
    """
    settings: dict[str, Any] = {
        "model": str(TARGET),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "block_size": 32,
        "seed": 0,
        # Of every engine of a run until its end, see `_ALIVE`: dozens of them share the memory.
        "kv_cache_memory_bytes": 128 << 20,
        # vLLM requires this share of a GPU to be free; here many engines share one.
        "gpu_memory_utilization": 0.3,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        **EMULATED,
    }
    if speculative is not None:
        settings["speculative_config"] = {
            "method": "specblock",
            "model": str(DRAFTER),
            "enable_adaptive_verification": False,
            **speculative,
        }
        if speculative.get("enable_adaptive_verification") and not current_platform.is_cpu():
            # vLLM wants full graphs with it. Without its compiler, sums stay those of eager steps.
            settings |= {"enforce_eager": False, "compilation_config": FULL_GRAPHS}
    engine = Engine(LLM(**{**settings, **changes}))
    _ALIVE.append(engine)
    gc.freeze()  # engines are many objects, all of which stay
    return engine


def shared_engine(speculative: dict[str, Any] | None, **changes: Any) -> Engine:
    """The engine with these options that all tests of a process share; its drafters learn anew.

    A test must leave it as it was. vLLM's counters are those of the newest engine.
    """
    if speculative is not None:
        speculative = {"model": str(DRAFTER), **speculative}
    key = json.dumps([speculative, changes], sort_keys=True)
    if key not in _SHARED:
        _SHARED[key] = make_engine(speculative, **changes)
    engine = _SHARED[key]
    if speculative is not None:
        with torch.inference_mode():  # in which a worker makes its tensors
            engine.speculator.forget_warm_up()
    return engine


def configure(speculative: dict | None = None, target=TARGET, **changes):
    """vLLM's own way from arguments to a config; loads no weight."""
    given = {"method": "specblock", "model": str(DRAFTER), "num_speculative_tokens": 24}
    return EngineArgs(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        speculative_config=given | (speculative or {}),
        **changes,
    ).create_engine_config()


def asynchronous_engine() -> Engine:
    """A shared engine of 12 nodes that schedules asynchronously on a CPU, too."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config):
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
        metrics = {"per_request_spec_decode_metrics": "summary"}
        engine = shared_engine({"num_speculative_tokens": 12}, async_scheduling=True, **metrics)
    assert engine.core.vllm_config.scheduler_config.async_scheduling
    return engine


def note_calls(patch: pytest.MonkeyPatch, owner, name: str, note: Callable[..., Any]) -> list:
    """Return a list that gets `note(result, *arguments)` of each call of a function from now on."""
    noted, function = [], getattr(owner, name)

    def noting(*args, **kwargs):
        result = function(*args, **kwargs)
        noted.append(note(result, *args, **kwargs))
        return result

    patch.setattr(owner, name, noting)
    return noted


def record_drafts(engine: Engine, patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens that the engine's speculator proposes for its first request, step by step."""
    return note_calls(patch, engine.speculator, "propose", lambda of, *_, **__: of[0].tolist())


def record_preemptions(engine: Engine) -> list[str]:
    """Ids of the requests that the engine's scheduler preempts from now on."""
    for_good, scheduler = pytest.MonkeyPatch(), engine.core.scheduler
    return note_calls(
        for_good, scheduler, "_preempt_request", lambda _, request, *__, **___: request.request_id
    )


def prompts(count: int = 10, seed: int = 5, shared: int = 70) -> list[list[int]]:
    """Token ids of different lengths, from 3 on; half of them share their first `shared` ids."""
    draw = random.Random(seed)
    common = [draw.randrange(3, 2048) for _ in range(shared)]
    lengths = [3, 90, 17, 75, 33, 120, 64, 150, 8, 200, 41, 97]
    out = []
    for index in range(count):
        length = lengths[index % len(lengths)]
        head = common[: length - 1] if length > shared else []
        out.append(head + [draw.randrange(3, 2048) for _ in range(length - len(head))])
    return out


LOGPROB_TOLERANCE = 2e-4
"""Nats: two runs attend in another order of summation."""


def assert_identical(with_us: list[list[Output]], without: list[list[Output]]) -> int:
    """Every token, reason, text and log-probability is the same; return the number of tokens."""
    tokens = 0
    for request, (ours, theirs) in enumerate(zip(with_us, without, strict=True)):
        for mine, other in zip(ours, theirs, strict=True):
            where = f"request {request}"
            for name in ("tokens", "finish_reason", "stop_reason", "text"):
                assert getattr(mine, name) == getattr(other, name), (where, name)
            assert (mine.logprobs is None) == (other.logprobs is None), where
            for place, (a, b) in enumerate(zip(mine.logprobs or [], other.logprobs or [])):
                last = min(value for value, _ in b.values())
                for token in a.keys() | b.keys():
                    # Only a tie at the end of the list may change which tokens are in it.
                    one, two = (each[token][0] if token in each else last for each in (a, b))
                    assert abs(one - two) < LOGPROB_TOLERANCE, (where, place)
            tokens += len(mine.tokens)
    return tokens
