"""Texts that drafters learn from and are evaluated on: lines, windows, prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.chat import PLAIN, make_target, text_of
from support.scripts import TARGET
from transformers import AutoTokenizer

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import chat, shards
from vllm_specblock.train.data.chat import BrokenLine, Conversation, Document, Prompt, parse
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.data.packed_dataset import PackedDataset, load_texts, pack_lengths
from vllm_specblock.train.data.prompts import read_prompts
from vllm_specblock.train.data.shards import Text
from vllm_specblock.train.target.features import load_tokenizer

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


def load(path, vocab_size=100):
    return [text.tokens.tolist() for text in load_texts(path, vocab_size)]


def windows_of(sequences, length=5, shortest=3, pack=False, loss_mask=None):
    texts = [Text(torch.tensor(s), torch.ones(len(s), dtype=torch.bool)) for s in sequences]
    if loss_mask is not None:
        texts = [Text(t.tokens, torch.tensor(c)) for t, c in zip(texts, loss_mask)]
    return PackedDataset(texts, length, shortest, pack)


def test_a_data_folder_is_read_shard_after_shard(tmp_path):
    for number, first in enumerate((3, 20)):
        text = Text(torch.arange(first, first + 4), torch.ones(4, dtype=torch.bool))
        shards.write_shard(shards.shard_path(tmp_path, number), [text])
    with pytest.raises(TrainError, match=r"no data\.json .*: run `specblock data` to its end"):
        load(tmp_path)
    shards.write_json(tmp_path / shards.INDEX, {"shards": 2})
    assert load(tmp_path) == [[3, 4, 5, 6], [20, 21, 22, 23]]


def test_long_sequences_are_cut_and_short_pieces_dropped():
    windows = windows_of([list(range(10, 22)), [5, 6]])  # leaves pieces of 5, 5, 2 and 2
    assert [list(map(tuple, window)) for window in windows.plan] == [[(0, 0, 5)], [(0, 5, 5)]]
    assert windows.of([1]).tokens.tolist() == [[15, 16, 17, 18, 19]]


def test_pieces_without_anything_to_learn_are_dropped():
    never, late = [True, True, False, False], [False, False, False, True]
    windows = windows_of([[3, 4, 5, 6], [7, 8, 9, 10]], loss_mask=[never, late])
    assert [window[0].sequence for window in windows.plan] == [1]
    with pytest.raises(TrainError, match="no sequence of 3 tokens"):
        windows_of([[3, 4]])


def test_a_packed_window_keeps_its_documents_apart():
    mask = [[True] * 3, [False, True, True, True], [True] * 3]
    windows = windows_of([[3, 4, 5], [6, 7, 8, 9], [10, 11, 12]], 8, pack=True, loss_mask=mask)
    assert [[segment.sequence for segment in window] for window in windows.plan] == [[0, 1], [2]]
    batch = windows.of([0, 1])
    assert batch.tokens.tolist() == [[3, 4, 5, 6, 7, 8, 9, -1], [10, 11, 12] + [-1] * 5]
    assert batch.document.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 1, 2, 3, 4, 5]]
    assert batch.position.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2] + [0] * 5]
    assert batch.loss_mask[0].tolist() == [*mask[0], *mask[1], False]
    assert batch.segments == tuple(windows.plan)
    row, place = torch.tensor([[0, 0, 3], [1, 2, 0]]), torch.tensor([[2, 3, 6], [2, 3, 9]])
    assert batch.at(batch.tokens, row, place, -7).tolist() == [[5, -7, 9], [12, -7, -7]]


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 64))
def test_packing_loses_nothing_and_overfills_nothing(lengths, room):
    windows = pack_lengths(lengths, room)
    assert sorted(i for window in windows for i in window) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in window) <= room for window in windows)
    # Any two windows that fit into one would have been one: best fit leaves no such pair.
    free = sorted(room - sum(lengths[i] for i in window) for window in windows)
    assert sum(room - f for f in free[-2:]) > room or len(free) < 2


def test_wrong_inputs_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / shards.INDEX).write_text('{"shards"')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    big = Text(torch.tensor([3, 4, 100]), torch.ones(3, dtype=torch.bool))
    shards.write_shard(tmp_path / "big.safetensors", [big])
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\x00")
    safetensors.torch.save_file({"ids": torch.ones(2)}, tmp_path / "other.safetensors")
    for name, reason in {
        "empty": r"no data\.json",
        "torn": r"data\.json is damaged, but must be a JSON object with shards",
        "a.jsonl": "is neither a folder",
        "big.safetensors": "token id 100, but the target's vocabulary ends at 99",
        "torn.safetensors": "not a readable safetensors",
        "other.safetensors": "must hold `tokens`",
    }.items():
        with pytest.raises(TrainError, match=reason) as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_batch_is_a_function_of_its_step_and_an_epoch_a_permutation():
    sequences = [[n, n, n] for n in range(10)]
    windows, fresh = windows_of(sequences), windows_of(sequences)
    in_order = [windows.batch(step, 4, seed=1).tokens[:, 0] for step in range(5)]
    assert all(torch.equal(fresh.batch(s, 4, 1).tokens[:, 0], in_order[s]) for s in (4, 0, 2))
    assert not torch.equal(fresh.batch(0, 4, seed=2).tokens[:, 0], in_order[0])
    first, second = torch.cat(in_order).view(2, 10).tolist()
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_the_fingerprint_sees_tokens_masks_and_windows():
    text = Text(torch.tensor([3, 4, 5, 6]), torch.ones(4, dtype=torch.bool))
    other = Text(text.tokens, torch.tensor([False, True, True, True]))
    found = {
        PackedDataset([text, text], 8, 3).fingerprint,
        PackedDataset([text, text], 8, 3, pack=False).fingerprint,
        PackedDataset([text, other], 8, 3).fingerprint,
        PackedDataset([text, Text(text.tokens + 1, text.loss_mask)], 8, 3).fingerprint,
    }
    assert len(found) == 4
    assert PackedDataset([text, text], 8, 3).fingerprint in found


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TARGET)


def lines(path: Path, *entries) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_lines_of_text(tokenizer, tmp_path):
    long = "def add(a, b):\n    return a + b\n" * 5
    path = lines(tmp_path / "a.jsonl", {"prompt": long}, {"text": long}, {"prompt": "import os"})
    whole = tokenizer(long)["input_ids"]
    found = read_prompts(path, tokenizer, 2, prompt_tokens=7, chat=False)
    assert [prompt.tolist() for prompt in found] == [whole, whole[:7]]


def test_chat_goes_through_the_template(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "Sum?"}, {"role": "assistant", "content": "1"}]
    path = lines(tmp_path / "a.jsonl", {"prompt": "Sum?"}, {"messages": turns})
    asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    for how in (None, True):
        assert [p.tolist() for p in read_prompts(path, tokenizer, 9, chat=how)] == [ids, ids]
    raw = tokenizer("Sum?")["input_ids"]
    assert [p.tolist() for p in read_prompts(path, tokenizer, 9, chat=False)] == [raw, ids]
    tokenizer.chat_template = None
    assert [p.tolist() for p in read_prompts(path, tokenizer, 1)] == [raw]
    with pytest.raises(TrainError, match="no chat template: drop --chat"):
        read_prompts(path, tokenizer, 1, chat=True)


def test_a_data_folder(tokenizer, tmp_path):
    def text(size: int, first: int) -> shards.Text:
        return shards.Text(torch.arange(size), torch.arange(size) >= first)

    texts = [text(9, 4), text(9, 0), text(3, 3)]
    shards.write_shard(shards.shard_path(tmp_path, 0), texts)
    shards.write_json(tmp_path / shards.INDEX, {"shards": 1})
    found = read_prompts(tmp_path, tokenizer, 9, prompt_tokens=6)
    assert [len(prompt) for prompt in found] == [4, 6, 3]
    with pytest.raises(TrainError, match=r"holds token id 5, but .* ends at 4"):
        read_prompts(tmp_path, tokenizer, 9, prompt_tokens=6, vocab_size=5)
