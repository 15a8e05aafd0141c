"""Where the prompts of an evaluation come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.prompts import read_prompts
from vllm_specblock.train.target.features import load_tokenizer

TARGET = Path(__file__).parents[3] / "examples" / "tiny_pair" / "target"


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
    found = read_prompts(path, tokenizer, 2, prompt_tokens=7)
    assert [prompt.tolist() for prompt in found] == [whole, whole[:7]]


def test_chat_goes_through_the_template(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "Sum?"}, {"role": "assistant", "content": "1"}]
    path = lines(tmp_path / "a.jsonl", {"prompt": "Sum?"}, {"messages": turns})
    asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert [p.tolist() for p in read_prompts(path, tokenizer, 9, chat=True)] == [ids, ids]
    raw = tokenizer("Sum?")["input_ids"]
    assert [p.tolist() for p in read_prompts(path, tokenizer, 9)] == [raw, ids]


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
