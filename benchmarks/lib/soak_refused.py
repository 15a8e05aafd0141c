"""Requests that a server has to refuse with a status of 4xx, and to survive."""

from __future__ import annotations

from typing import Any

_TOO_MANY = 1 << 20

WRONG_KEYS: dict[str, dict[str, Any]] = {
    "temperature below 0": {"temperature": -1},
    "temperature that is a word": {"temperature": "hot"},
    "top_p above 1": {"top_p": 1.5},
    "top_k below −1": {"top_k": -5},
    "min_p above 1": {"min_p": 2},
    "n = 0": {"n": 0},
    "several greedy answers": {"n": 2, "temperature": 0},
    "max_tokens below 0": {"max_tokens": -1},
    "more tokens than the model takes": {"max_tokens": _TOO_MANY},
    "least tokens above most": {"min_tokens": 9, "max_tokens": 3},
    "presence penalty of 5": {"presence_penalty": 5},
    "repetition penalty of 0": {"repetition_penalty": 0},
    "bias of a token that there is not": {"logit_bias": {str(_TOO_MANY): 1}},
    "allowed token that there is not": {"allowed_token_ids": [_TOO_MANY]},
    "nothing allowed": {"allowed_token_ids": []},
    "empty stop string": {"stop": [""]},
    "too many log-probabilities": {"logprobs": 999},
    "seed that is a word": {"seed": "abc"},
    "regex that does not end": {"structured_outputs": {"regex": "[a-z"}},
    "two grammars": {"structured_outputs": {"regex": "a+", "choice": ["a"]}},
    "schema of an unknown type": {"structured_outputs": {"json": {"type": "tree"}}},
    "stream options without a stream": {"stream_options": {"include_usage": True}},
    "model that there is not": {"model": "no/such/model"},
}


def wrong_requests(model: str, prompt: list[int]) -> list[tuple[str, str, dict[str, Any] | bytes]]:
    """Name, path and body of each; `prompt` is a right one."""
    right = {"model": model, "prompt": prompt, "max_tokens": 8}
    path = "/v1/completions"
    found: list[tuple[str, str, dict[str, Any] | bytes]] = [
        (name, path, right | keys) for name, keys in WRONG_KEYS.items()
    ]
    return [
        *found,
        ("prompt longer than the model takes", path, right | {"prompt": prompt[:1] * 5_000}),
        ("token that there is not", path, right | {"prompt": [*prompt, _TOO_MANY]}),
        ("no prompt", path, {"model": model}),
        ("JSON that breaks off", path, b'{"model": "' + model.encode()),
        ("chat without messages", "/v1/chat/completions", {"model": model, "messages": []}),
        ("messages that are a text", "/v1/chat/completions", {"model": model, "messages": "hello"}),
    ]
