"""Mixed traffic for a server: requests of many kinds, all drawn from one seed.

A request is one draw from each of five tables: what it is asked with (`PROMPTS`), how it samples
(`SAMPLING`), what binds its text (`CONSTRAINTS`), what else it wants back (`EXTRAS`), and how its
client reads (`CLIENTS`). Some are wrong (`WRONG_KEYS`): the server has to refuse them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_MODEL_LEN = 512
"""Of the server, in tokens."""
LONGEST_PROMPT = 300
VOCAB = 2048


@dataclass(frozen=True)
class Call:
    """One request over HTTP."""

    key: str  # of this request alone, within all traffic of a seed
    kinds: tuple[str, ...]  # what was drawn for it
    path: str
    body: dict[str, Any] | bytes  # bytes: sent as they are
    leaves_after: int | None = None  # events of a stream after which the client closes it
    patience: float | None = None  # seconds after which it does in any case
    refused: bool = False  # the server has to answer with an error of the client's

    def patient(self) -> Call:
        return replace(self, leaves_after=None, patience=None)


Weighted = dict[str, tuple[int, dict[str, Any]]]
"""Weight of each kind, and its keys of the request's body."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "kind": {"enum": ["file", "folder", "link"]},
    },
    "required": ["name", "size", "kind"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA}}
SAMPLING: Weighted = {
    "greedy": (6, {"temperature": 0}),
    "T = 0.3": (1, {"temperature": 0.3}),
    "T = 0.7": (2, {"temperature": 0.7}),
    "T = 1": (2, {"temperature": 1.0}),
    "T = 1.5": (1, {"temperature": 1.5}),
    "top-p": (1, {"temperature": 1.0, "top_p": 0.9}),
    "top-k": (1, {"temperature": 0.7, "top_k": 20}),
    "top-k and top-p": (1, {"temperature": 1.0, "top_k": 30, "top_p": 0.8}),
    "min-p": (1, {"temperature": 1.0, "min_p": 0.05}),
}
CONSTRAINTS: Weighted = {
    "free": (20, {}),
    "repetition penalty": (2, {"repetition_penalty": 1.3}),
    "presence penalty": (1, {"presence_penalty": 0.9}),
    "frequency penalty": (1, {"frequency_penalty": 0.6}),
    "logit bias": (2, {"logit_bias": {"20": 4.0, "33": -5.0}}),
    "allowed tokens": (1, {"allowed_token_ids": list(range(3, VOCAB, 3))}),
    "bad words": (1, {"bad_words": ["self", "return", "def"]}),
    "stop string": (2, {"stop": ["\n\n", "return"]}),
    "stop string kept": (1, {"stop": ["):"], "include_stop_str_in_output": True}),
    "stop token": (1, {"stop_token_ids": list(range(5, VOCAB, 40))}),
    "least tokens": (1, {"min_tokens": 1, "stop": ["("]}),
    "regex": (2, {"structured_outputs": {"regex": "[a-z]{3,12}(, [a-z]{3,12}){0,9}"}}),
    "choice": (1, {"structured_outputs": {"choice": ["a tree", "a chain", "a list of words"]}}),
    "JSON": (2, {"structured_outputs": {"json": SCHEMA}}),
    "JSON by response format": (1, {"response_format": FORMAT}),
}
EXTRAS: Weighted = {
    "text only": (12, {}),
    "log-probabilities": (3, {"logprobs": 3}),
    "log-probabilities of the prompt": (1, {"prompt_logprobs": 2}),
    "echo": (1, {"echo": True}),
    "n = 2": (2, {"n": 2}),
    "n = 3": (1, {"n": 3}),
    "several prompts": (1, {}),
    "no drafts": (1, {"vllm_xargs": {"specblock_draft": 0}}),
    "no later request's draft": (1, {"vllm_xargs": {"specblock_share": 0}}),
}
CLIENTS: Weighted = {
    "whole": (10, {}),
    "stream": (8, {}),
    "leaves a stream": (3, {}),
    "does not wait": (2, {}),
}
PROMPTS: Weighted = {
    "short": (5, {}),
    "long": (3, {}),
    "shared beginning": (4, {}),
    "repeats itself": (2, {}),
    "any tokens": (2, {}),
}
MAX_TOKENS = (1, 1, 2, 8, 24, 24, 48, 48, 80, 120)
WRONG = 0.06
"""Share of requests that are wrong."""
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
    """Return the name, path and body of each; `prompt` is a right one."""
    right = {"model": model, "prompt": prompt, "max_tokens": 8}
    path = COMPLETIONS
    return [
        *((name, path, right | keys) for name, keys in WRONG_KEYS.items()),
        ("prompt longer than the model takes", path, right | {"prompt": prompt[:1] * 5_000}),
        ("token that there is not", path, right | {"prompt": [*prompt, _TOO_MANY]}),
        ("no prompt", path, {"model": model}),
        ("JSON that breaks off", path, b'{"model": "' + model.encode()),
        ("chat without messages", CHAT, {"model": model, "messages": []}),
        ("messages that are a text", CHAT, {"model": model, "messages": "hello"}),
    ]


class Traffic:
    """Requests without end, prompts cut from `texts`; models: names of a target and adapters."""

    def __init__(self, seed: int, models: list[str], tokenizer: Path, texts: Sequence[str]) -> None:
        from tokenizers import Tokenizer

        self.seed, self.models = seed, models
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        rng = random.Random(f"{seed} texts")
        long, self.tokens = [text for text in texts if len(text) > 8_000], []
        for _ in range(64):
            text = rng.choice(long)
            begin = text.index("\n", rng.randrange(len(text) - 6_000)) + 1
            self.tokens.append(self.tokenizer.encode(text[begin:][:5_000]).ids)
        self.shared = [ids[:160] for ids in self.tokens[:6]]

    def call(self, key: str) -> Call:
        """The request of a key."""
        rng = random.Random(f"{self.seed} {key}")
        prompt_kind = _pick(rng, PROMPTS)
        prompt = self._prompt(rng, prompt_kind)
        if rng.random() < WRONG:
            name, path, body = rng.choice(wrong_requests(self.models[0], prompt))
            return Call(key, ("wrong", f"wrong: {name}"), path, body, refused=True)
        sampling, constraint, extra, client = (
            _pick(rng, table) for table in (SAMPLING, CONSTRAINTS, EXTRAS, CLIENTS)
        )
        if sampling == "greedy" and extra.startswith("n ="):
            sampling = "T = 1"  # vLLM refuses several greedy answers
        streamed = client.endswith("stream")
        if (streamed or len(self.models) > 1) and extra == "log-probabilities of the prompt":
            extra = "log-probabilities"  # vLLM refuses them in streams, and fails beside adapters
        body: dict[str, Any] = {
            "model": rng.choice(self.models),
            "request_id": key,
            "seed": rng.randrange(1 << 31),
            "max_tokens": rng.choice(MAX_TOKENS),
            "ignore_eos": rng.random() < 0.3,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # texts of two tokens may be equal
            **SAMPLING[sampling][1],
            **CONSTRAINTS[constraint][1],
            **EXTRAS[extra][1],
        }
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        kinds = (prompt_kind, sampling, constraint, extra, client)
        chats = rng.random() < 0.35 and extra not in ("echo", "several prompts")
        if chats:
            body |= self._chat(rng, prompt)
            if "logprobs" in body:
                body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        elif extra == "several prompts":
            body["prompt"] = [prompt[:150], *(self._prompt(rng, "short") for _ in range(2))]
        else:
            body["prompt"] = prompt if rng.random() < 0.5 else self.tokenizer.decode(prompt)
        return Call(
            key,
            (*kinds, "chat" if chats else "completion"),
            CHAT if chats else COMPLETIONS,
            body,
            leaves_after=rng.choice((0, 1, 3, 8)) if client == "leaves a stream" else None,
            patience=rng.uniform(0.02, 1.5) if client == "does not wait" else None,
        )

    def _prompt(self, rng: random.Random, kind: str) -> list[int]:
        """Token ids, `LONGEST_PROMPT` at most."""
        text = rng.choice(self.tokens)
        start = rng.randrange(max(1, len(text) - LONGEST_PROMPT))
        if kind == "any tokens":
            return [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 120))]
        if kind == "long":
            return text[start:][: rng.randrange(200, LONGEST_PROMPT)]
        short = text[start:][: rng.randrange(2, 60)]
        if kind == "shared beginning":
            return rng.choice(self.shared) + short
        if kind == "repeats itself":
            return (short * 5)[: rng.randrange(60, 200)]
        return short

    def _chat(self, rng: random.Random, prompt: list[int]) -> dict[str, Any]:
        turns = [prompt]
        if rng.random() >= 0.6:
            turns = [self.shared[0][:60], prompt[:40], prompt[40:200]]
        contents = [self.tokenizer.decode(turn) for turn in turns if turn]
        roles = ("user", "assistant", "user")
        return {"messages": [{"role": r, "content": text} for r, text in zip(roles, contents)]}


def _pick(rng: random.Random, table: Weighted) -> str:
    return rng.choices([*table], [weight for weight, _ in table.values()])[0]
