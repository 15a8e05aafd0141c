"""The matrix of sampling parameters over which an engine with heads must say what vLLM says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.engines import Engine, Output, assert_identical, make_engine, prompts
from vllm import SamplingParams

PROMPTS = prompts()

CASES = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "top-k and top-p": {"temperature": 1.0, "top_k": 30, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "greedy log-probabilities": {"logprobs": 4},
    "sampled log-probabilities": {"temperature": 1.0, "logprobs": 2},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence penalty, sampled": {"temperature": 0.8, "presence_penalty": 0.9},
    "frequency penalty": {"frequency_penalty": 0.6},
    "logit bias": {"logit_bias": {20: 4.0, 33: -5.0}},
    "logit bias, sampled": {"temperature": 1.0, "logit_bias": {20: 3.0}},
    "allowed tokens": {"temperature": 1.0, "allowed_token_ids": list(range(3, 2048, 3))},
}


def params(count: int = len(PROMPTS), **common) -> list[SamplingParams]:
    """One per prompt, each with a seed of its own and, unless given, a length of its own."""
    return [
        SamplingParams(
            **{"temperature": 0.0, "ignore_eos": True, "seed": 1000 + i, "max_tokens": 36 + 5 * i}
            | common
        )
        for i in range(count)
    ]


def half_sampled(count: int = len(PROMPTS), **common) -> list[SamplingParams]:
    """Greedy and sampled requests in turn."""
    requests = params(count, **common)
    for request in requests[1::2]:
        request.temperature = 1.0
    return requests


def every_case(each: int = 3) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and requests of all cases, so many each; a batch mixes neighbouring cases."""
    texts, requests = [], []
    for number, common in enumerate(CASES.values()):
        chosen = [(number + 3 * place) % len(PROMPTS) for place in range(each)]
        texts += [PROMPTS[index] for index in chosen]
        requests += [params(**common)[index] for index in chosen]
    return texts, requests


def crowded_engine(speculative: dict) -> Engine:
    """An engine with far too small a cache: prompts come in chunks, requests are preempted."""
    return make_engine(
        speculative, max_num_batched_tokens=96, num_gpu_blocks_override=24, max_model_len=256
    )


def no_pause(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Draft in each step at any cost."""
    manager = engine.runner.adaptive_verification
    manager.all_paused = False
    patch.setattr(manager.controller, "drafts", lambda *_: True)
    patch.setattr(manager.controller, "stops", lambda *_: False)


def to_the_limit() -> list[SamplingParams]:
    """Requests that go on until the crowded engine's length limit, one per prompt."""
    requests = half_sampled()
    for request, text in zip(requests, PROMPTS):
        request.max_tokens = 256 - len(text)
    return requests


@dataclass
class Reference:
    """What an engine without heads gives; everything is generated once."""

    plain: Engine
    known: dict[str, list[list[Output]]] = field(default_factory=dict)

    def __call__(
        self, name: str, requests: list[SamplingParams], texts: Sequence[list[int]] = PROMPTS
    ) -> list[list[Output]]:
        """Outputs of `requests`; the same `name` must mean the same requests."""
        if name not in self.known:
            self.known[name] = self.plain.generate(texts, requests)
        return self.known[name]


@dataclass
class Checker:
    """Holds engines against expected outputs, and counts the tokens."""

    tokens: int = 0

    def __call__(self, engine: Engine, requests, expected, texts=PROMPTS) -> list[list[Output]]:
        """Return what the engine gave."""
        outputs = engine.generate(texts, requests)
        found = assert_identical(outputs, expected)
        assert found > 0, "nothing was compared"
        self.tokens += found
        return outputs
