from __future__ import annotations

import gzip
import json

import pytest
from support.chat import PLAIN, make_target, text_of
from transformers import AutoTokenizer

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import chat
from vllm_specblock.train.data.chat import BrokenLine, Conversation, Document, Prompt, parse
from vllm_specblock.train.data.chat_tokens import ChatTokens

U, A, S = "user", "assistant", "system"


def said(*turns):
    return tuple({"role": role, "content": text} for role, text in turns)


def sharegpt(*turns):
    return {"id": 3, "conversations": [{"from": who, "value": text} for who, text in turns]}


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (sharegpt(("human", "a"), ("gpt", "b")), Conversation(said((U, "a"), (A, "b")))),
        (sharegpt(("system", "s"), ("user", "a")), Conversation(said((S, "s"), (U, "a")))),
        (sharegpt(("gpt", "x"), ("human", "a")), Conversation(said((U, "a")))),
        # UltraChat's own lines carry a prompt beside the messages.
        (
            {"prompt": "a", "messages": said((U, "a"), (A, "b"))},
            Conversation(said((U, "a"), (A, "b"))),
        ),
        ({"data": ["a", "b", "c"]}, Conversation(said((U, "a"), (A, "b"), (U, "c")))),
        ({"prompt": " a"}, Prompt(" a")),
        ({"text": "a\n"}, Document("a\n")),
    ],
)
def test_layouts(line, entry):
    assert parse(json.dumps(line).encode()) == entry
    assert parse(b"\xef\xbb\xbf" + json.dumps(line).encode() + b"\r\n") == entry


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "it is not JSON"),
        (b"[1]", "it is not a JSON object"),
        (b'{"text": "caf\xe9"}', "it is not UTF-8"),
        (b'{"text": ' + b"9" * 5000 + b"}", "of a size that can be read"),
        (b"[" * 100_000, "of a size that can be read"),
        (b'{"turns": []}', '"turns" is not a list of questions'),
        (b'{"input": "a"}', "it has none of the keys"),
        (b'{"text": 3}', '"text" is not a string'),
        (b'{"prompt": " "}', '"prompt" is empty'),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"data": "ab"}', '"data" is not a list'),
        (b'{"data": ["a", null]}', "turn 2 is not a string"),
        (b'{"messages": {"role": "user"}}', "turns are not a list"),
        (b'{"messages": [{"role": "user", "value": "a"}]}', 'turn 1 has no "role" and "content"'),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "turn 1 is by 'tool'"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no user turn"),
        (
            b'{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}, '
            b'{"role": "user", "content": "a"}]}',
            "turn 3 is the user's, not the assistant's",
        ),
    ],
)
def test_broken_lines(line, reason):
    with pytest.raises(BrokenLine) as caught:
        parse(line)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def files(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"text": "one"}  \n \n{"text"\n{"prompt": "two"}\n')
    second.write_text('{"what": 1}\n{"text": "three"}')
    return first, second


@pytest.mark.parametrize("pack", [False, True])
def test_usable_lines_and_reports_of_the_others(files, tmp_path, pack):
    if pack:
        packed = tmp_path / "a.jsonl.gz"
        packed.write_bytes(gzip.compress(files[0].read_bytes()))
        files = packed, files[1]
    reports = []
    assert list(chat.read_lines(files, None, True, reports.append)) == [
        (f"{files[0]}:1", Document("one")),
        (f"{files[0]}:4", Prompt("two")),
        (f"{files[1]}:2", Document("three")),
    ]
    broken, other = reports
    assert broken.startswith(f"{files[0]}:3: ") and other.startswith(f"{files[1]}:1: ")
    first = list(chat.read_lines(files, 1, True, reports.append))
    assert first == [(f"{files[0]}:1", Document("one"))]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"{" + raw])
def test_a_broken_archive_is_one_sentence(tmp_path, damage):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "one"}\n' * 99)))
    with pytest.raises(TrainError, match=r"a\.jsonl\.gz is not a whole gzip file") as caught:
        list(chat.read_lines([path], None, True, lambda reason: None))
    assert "\n" not in str(caught.value)


def chat_tokens(tmp_path, template, **options):
    tokenizer = AutoTokenizer.from_pretrained(make_target(tmp_path / "target", template))
    return ChatTokens(tokenizer, 1000, options)


def test_a_template_gets_its_options_and_may_refuse(tmp_path):
    strict = "{% if mood != 'kind' %}{{ raise_exception('no ' + mood) }}{% endif %}" + PLAIN
    assert text_of(chat_tokens(tmp_path, strict, mood="kind").question(said((U, "a")))) == (
        "user: a\nassistant: "
    )
    with pytest.raises(BrokenLine, match="the chat template refuses it: no bad"):
        chat_tokens(tmp_path, strict, mood="bad").question(said((U, "a")))
