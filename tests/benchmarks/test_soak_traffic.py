"""The traffic of a soak: what comes of a seed, and that it has all kinds."""

from __future__ import annotations

import pytest
from lib.results_store import ROOT
from lib.soak_phases import MODEL, prompts_text
from lib.soak_traffic import (
    CHAT,
    CLIENTS,
    COMPLETIONS,
    CONSTRAINTS,
    EXTRAS,
    LONGEST_PROMPT,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    PROMPTS,
    SAMPLING,
    Traffic,
)


@pytest.fixture(scope="module")
def texts():
    return prompts_text()


def traffic(texts, seed=0, models=("a", "b"), **options) -> Traffic:
    return Traffic(seed, models, ROOT / MODEL / "tokenizer.json", texts, **options)


def test_traffic_comes_back(texts):
    one, other = traffic(texts), traffic(texts)
    assert one.window(3, 20) == other.window(3, 20)
    assert one.window(3, 20) != traffic(texts, seed=1).window(3, 20)
    assert one.window(4, 20) != one.window(3, 20)
    assert one.window(3, 20)[7] == other.call("3.7")


def test_every_kind_comes(texts):
    calls = traffic(texts).window(0, 600)
    seen = {kind for call in calls for kind in call.kinds}
    for table in (PROMPTS, SAMPLING, CONSTRAINTS, EXTRAS, CLIENTS):
        assert table.keys() <= seen
    assert {"wrong", "chat", "completion", "model a", "model b"} <= seen
    assert {call.path for call in calls} == {CHAT, COMPLETIONS}
    assert len({call.key for call in calls}) == 600


def test_right_requests_fit(texts):
    """Or they would be refused, and nobody would notice that nothing was asked."""
    source = traffic(texts)
    encode = source.tokenizer.encode
    assert LONGEST_PROMPT + max(MAX_TOKENS) < MAX_MODEL_LEN
    for call in source.window(1, 300):
        if call.refused:
            continue
        assert isinstance(call.body, dict)
        if call.path == CHAT:
            said = "".join(turn["content"] for turn in call.body["messages"])
            roles = 20 * (1 + len(call.body["messages"]))  # what the template puts between
            assert len(encode(said).ids) + roles + max(MAX_TOKENS) <= MAX_MODEL_LEN
        elif isinstance(call.body["prompt"], str):
            assert 0 < len(encode(call.body["prompt"]).ids) + max(MAX_TOKENS) <= MAX_MODEL_LEN


def test_what_vllm_refuses_is_not_asked(texts):
    for call in traffic(texts).window(2, 400):
        if not call.refused:
            assert not (call.body.get("n", 1) > 1 and call.body["temperature"] == 0)
            assert not (call.body.get("stream") and "prompt_logprobs" in call.body)
    (kind,) = (name for name, (_, keys) in EXTRAS.items() if "prompt_logprobs" in keys)
    calls = traffic(texts, without={kind}).window(2, 400)
    assert not any("prompt_logprobs" in call.body for call in calls if not call.refused)
