"""Sets from files and folders, and what the target reads of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import Question, Reader, read_questions, read_sets
from vllm_specblock.train.data.chat_tokens import ChatTokens

TARGET = Path(__file__).resolve().parents[2] / "examples/tiny_pair/target"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a{% if loud %}!{% endif %}:{% endif %}"
)
CHAT = Question("c", ("one", "two"))


def reader(template: str | None = TEMPLATE, raw: bool = False, **options) -> Reader:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = template
    return Reader(ChatTokens(tokenizer, 2048, options), raw)


def prompt(asked: Reader, *answers: str) -> str:
    return asked.tokens.said(asked.prompt(CHAT, [*map(asked.tokens.ids, answers)]))


def test_a_folder_is_every_file_in_it(make_config, questions):
    sets = read_sets(make_config())
    assert {name: len(found) for name, found in sets.items()} == {"chats": 2, "single": 5}
    assert sets["chats"][0] == Question("a", ("one", "two"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"id": 1, "turns": ["\xff"]}', "Line 2 of .* is no question"),
        (b"{", "Line 2 of .* is no question"),
        (b'{"id": 1}', "Line 2 of .* is no question"),
        (b'{"id": 1, "turns": []}', "Line 2 of .* is no question"),
        (b'{"id": 1, "turns": [2]}', "Line 2 of .* is no question"),
        (b'{"id": "a", "turns": ["x"]}', "Two questions of .* have one id"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, says):
    path = tmp_path / "s.jsonl"
    path.write_bytes(b'{"id": "a", "turns": ["x"]}\n' + line + b"\n")
    with pytest.raises(BenchError, match=says):
        read_questions(path)


def test_a_question_may_hold_any_end_of_a_line(tmp_path):
    path, turns = tmp_path / "s.jsonl", ["a\u2028b\x85c\r\nd"]
    line = json.dumps({"id": "a", "turns": turns}, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n\r\n".encode())
    assert read_questions(path) == [Question("a", tuple(turns))]


def test_a_set_that_is_not_there(make_config, tmp_path, questions):
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").touch()
    neither = "is neither NAME=FILE nor a folder of .jsonl files"
    for given, says in (
        ("x=nowhere.jsonl", f"The set x=nowhere.jsonl {neither}"),
        (str(tmp_path / "empty"), neither),
        (f"x={tmp_path / 'none.jsonl'}", "There is no question in"),
    ):
        with pytest.raises(BenchError, match=says):
            read_sets(make_config(set=(given,)))
    with pytest.raises(BenchError, match="Two sets are called single"):
        read_sets(make_config(set=(str(questions), f"single={questions / 'single.jsonl'}")))


def test_a_turn_comes_after_the_engines_own_answer():
    asked = reader()
    assert prompt(asked) == "u:one;a:"
    assert prompt(asked, "yes") == "u:one;a:yes;u:two;a:"
    assert prompt(reader(loud=True)) == "u:one;a!:"
    asked = reader(None, raw=True)
    assert asked.prompt(CHAT, []) == asked.tokens.raw("one")
    assert prompt(asked, "yes") == "oneyestwo"


def test_chats_need_a_template():
    with pytest.raises(BenchError, match="no chat template: use --raw"):
        reader(None)
