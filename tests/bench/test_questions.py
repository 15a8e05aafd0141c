"""Sets from files and folders, and what the target reads of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import (
    Question,
    Reader,
    read_questions,
    read_sets,
)
from vllm_specblock.train.data.chat_tokens import ChatTokens

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a{% if loud %}!{% endif %}:{% endif %}"
)


def tokenizer(template: str | None):
    """A letter is a token, by its code; of transformers' interface what `ChatTokens` needs."""
    from jinja2 import Template

    def apply_chat_template(messages, add_generation_prompt, tokenize, return_dict, **options):
        text = Template(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **options
        )
        return list(map(ord, text))

    class Letters(SimpleNamespace):
        def __call__(self, text, **_):
            return {"input_ids": list(map(ord, text))}

        def decode(self, ids, **_):
            return text(ids)

    return Letters(
        bos_token_id=1,
        eos_token_id=2,
        chat_template=template,
        apply_chat_template=apply_chat_template,
    )


def reader(template: str | None = TEMPLATE, raw: bool = False, **options) -> Reader:
    return Reader(ChatTokens(tokenizer(template), 1000, options), raw)


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


YES = [*map(ord, "yes")]
CHAT = Question("c", ("one", "two"))


def test_a_folder_is_every_file_in_it(make_config, questions):
    sets = read_sets(make_config())
    assert {name: len(found) for name, found in sets.items()} == {"chats": 2, "single": 5}
    assert sets["chats"][0] == Question("a", ("one", "two"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"id": 1, "turns": ["\xff"]}', "Line 2 of .* is no question"),
        ("{", "Line 2 of .* is no question"),
        ('{"id": 1}', "Line 2 of .* is no question"),
        ('{"id": 1, "turns": []}', "Line 2 of .* is no question"),
        ('{"id": 1, "turns": [2]}', "Line 2 of .* is no question"),
        ('{"id": "a", "turns": ["x"]}', "Two questions of .* have one id"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, says):
    path = tmp_path / "s.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps({"id": "a", "turns": ["x"]}).encode() + b"\n" + line + b"\n")
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
    for given, says in (
        ("nowhere.jsonl", "There is no set of questions nowhere.jsonl"),
        (str(tmp_path / "empty"), "no .jsonl file in the folder"),
        (str(tmp_path / "none.jsonl"), "There is no question in"),
    ):
        with pytest.raises(BenchError, match=says):
            read_sets(make_config(set=(given,)))
    with pytest.raises(BenchError, match="Two sets are called single"):
        read_sets(make_config(set=(str(questions), str(questions / "single.jsonl"))))


def test_a_turn_comes_after_the_engines_own_answer():
    asked = reader()
    assert text(asked.prompt(CHAT, [])) == "u:one;a:"
    assert text(asked.prompt(CHAT, [YES])) == "u:one;a:yes;u:two;a:"
    assert text(reader(loud=True).prompt(CHAT, [])) == "u:one;a!:"


def test_raw_text_goes_on():
    asked = reader(None, raw=True)
    assert asked.prompt(CHAT, []) == [1, *map(ord, "one")]
    assert text(asked.prompt(CHAT, [YES])[1:]) == "oneyestwo"


def test_chats_need_a_template():
    with pytest.raises(BenchError, match="no chat template: use --raw"):
        reader(None)
