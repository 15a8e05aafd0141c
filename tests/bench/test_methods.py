"""What is asked of whom: methods by name, questions from sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import TARGET
from transformers import AutoTokenizer

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.methods import BUILT_IN, resolve
from vllm_specblock.bench.questions import Question, Reader, read_questions, read_sets
from vllm_specblock.config import parse_combine, parse_drafter, split_keys
from vllm_specblock.train.data.chat_tokens import ChatTokens


@pytest.fixture
def drafters(tmp_path) -> dict[str, Path]:
    """A folder for every drafter that a built-in method needs."""
    names = ("specblock", "eagle3", "dflash", "jetspec", "sps", "medusa", "parallelspec", "falcon")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    return {name: tmp_path / name for name in names}


def methods(make_config, *names, **changes):
    return resolve(make_config({}, method=("plain", *names), **changes))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_method_is_one_that_the_plugin_takes(make_config, drafters, name):
    names = [] if name == "plain" else [name]
    method = methods(make_config, *names, drafter=drafters, nodes=24)[name]
    assert bool(method.speculative) != name.startswith("plain")
    assert method.env["VLLM_USE_V2_MODEL_RUNNER"] == (None if name == "plain" else "1")
    if method.speculative.get("method") != "specblock":
        return
    assert method.speculative["num_speculative_tokens"] == 24
    first, second, combine = split_keys(method.speculative)
    for head in filter(None, (first, second)):
        assert head.get("kind") == "ngram" or Path(head["model"]).is_dir()
        assert parse_drafter({k: v for k, v in head.items() if k not in ("kind", "model")}, "ngram")
    assert parse_combine(combine)


def test_a_method_of_ones_own_changes_a_built_in_one(make_config):
    define = {
        "deep": {"base": "eagle3-chain", "speculative": {"model": "x"}, "engine": {"a": 1}},
        "ngram": {"base": "ngram", "speculative": {"branches": 2, "kind": None}},
    }
    found = methods(make_config, "deep", "ngram", define=define, nodes=7)
    assert found["ngram"].speculative == {
        "method": "specblock",
        "enable_adaptive_verification": False,
        "branches": 2,
        "num_speculative_tokens": 7,
    }
    assert found["ngram"].env == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    chain = {"method": "eagle3", "model": "x", "num_speculative_tokens": 3}
    assert found["deep"].speculative == chain and found["deep"].engine == {"a": 1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": ("ngram",)}, "plain vLLM, which is not among the methods"),
        ({"method": ("plain", "xyz")}, "There is no method xyz; there are plain, .*falcon"),
        ({"method": ("plain", "eagle3")}, "The method eagle3 needs --drafter eagle3=FOLDER"),
        (
            {"method": ("plain", "eagle3"), "drafter": {"eagle3": "nowhere"}},
            "The drafter eagle3=nowhere is not a folder",
        ),
        (
            {"method": ("plain", "a"), "define": {"a": {"base": "b"}, "b": {}}},
            "There is no method b",
        ),
        (
            {"method": ("plain", "a"), "define": {"a": {"speculative": {"model": "x"}}}},
            "The method a has a speculative_config without 'method'",
        ),
    ],
)
def test_what_cannot_be_served(make_config, changes, says):
    with pytest.raises(BenchError, match=says) as error:
        resolve(make_config({}, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_drafter_trained_again_needs_a_folder_of_its_own(make_bench, drafters, name):
    weights = drafters["eagle3"] / "model.safetensors"
    weights = weights.rename(weights.with_name(name))
    make_bench({}, drafter=drafters)
    make_bench({}, drafter=drafters)
    weights.write_bytes(b"again")
    with pytest.raises(BenchError, match="has results with other drafter eagle3: give another"):
        make_bench({}, drafter=drafters)


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
        (b'{"id": 1, "turns": ["\xff"]}', "Line 2 of .* is not a question"),
        (b"{", "Line 2 of .* is not a question"),
        (b'{"id": 1}', "Line 2 of .* is not a question"),
        (b'{"id": 1, "turns": []}', "Line 2 of .* is not a question"),
        (b'{"id": 1, "turns": [2]}', "Line 2 of .* is not a question"),
        (b'{"id": "a", "turns": ["x"]}', "Two questions of .* have the same id"),
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
        (f"x={tmp_path / 'none.jsonl'}", "has no questions"),
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
