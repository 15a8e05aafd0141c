"""vLLM's streaming tool parsers with several tokens per step, as accepted paths give."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from support.engines import TARGET
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

CALLS = [("add", {"a": 1}), ("get_weather", {"city": "Paris", "days": 3}), ("add", {"b": [2]})]


@pytest.fixture(scope="module")
def tokenizer():
    found = AutoTokenizer.from_pretrained(TARGET)
    found.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    return found


def streamed(tokenizer, parser: str, ids: list[int], cuts: list[int]) -> list[tuple[str, str]]:
    """Return the names and arguments that a client assembles from deltas ending at `cuts`."""
    kind = ParserManager.get_parser(parser, enable_auto_tools=True, model_name="target")
    request = ChatCompletionRequest(
        model="target",
        messages=[{"role": "user", "content": "?"}],
        tools=[{"type": "function", "function": {"name": name}} for name, _ in CALLS[:2]],
        stream=True,
    )
    reader, calls = kind(tokenizer, request.tools), {}
    texts = [tokenizer.decode(ids[:cut]) for cut in [0, *cuts]]
    for (start, end), (before, after) in zip(pairwise([0, *cuts]), pairwise(texts)):
        delta = reader.parse_delta(
            after[len(before) :],
            ids[start:end],
            request,
            prompt_token_ids=[1],
            finished=end == len(ids),
        )
        for part in delta.tool_calls if delta else ():
            call = calls.setdefault(part.index, ["", ""])
            call[0] += part.function.name or ""
            call[1] += part.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


def expected() -> list[tuple[str, str]]:
    return [(name, json.dumps(arguments)) for name, arguments in CALLS]


def llama_answer() -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in CALLS)


def hermes_answer() -> str:
    calls = (json.dumps({"name": name, "arguments": given}) for name, given in CALLS)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.parametrize(
    ("parser", "answer"), [("llama3_json", llama_answer()), ("hermes", hermes_answer())]
)
def test_deltas_of_a_path(tokenizer, parser, answer, size):
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    cuts = [*range(size, len(ids), size), len(ids)]
    assert streamed(tokenizer, parser, ids, cuts) == expected()


@pytest.mark.xfail(strict=True, reason="vLLM 0.32: see docs/troubleshooting.md")
def test_llama3_json_takes_a_delta_from_one_name_to_the_next(tokenizer):
    """If it passes, drop the advice in docs/troubleshooting.md."""
    answer = llama_answer()
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    # Before the first name ends, and behind the opening brace of the second call.
    begin, end = answer.index('", "parameters'), answer.index("; ") + len('; {"')
    lengths = [len(tokenizer.decode(ids[:cut])) for cut in range(1, len(ids) + 1)]
    first = max(cut for cut, length in enumerate(lengths, 1) if length <= begin)
    second = min(cut for cut, length in enumerate(lengths, 1) if length >= end)
    cuts = [*range(1, first + 1), *range(second, len(ids) + 1)]
    assert streamed(tokenizer, "llama3_json", ids, cuts) == expected()
