from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from vllm_specblock.train import data
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import NO_TOKEN, Windows


class Letters:
    """A tokenizer: one id per letter, BOS 1, EOS 2."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) - 87 for letter in text]}  # a = 10


def load(path, vocab_size=100, length=5, shortest=3):
    return data.load(path, Letters, vocab_size, length, shortest)


def test_text_files_are_framed_and_cut(tmp_path):
    (tmp_path / "b.txt").write_text("ij")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("abcdefg")
    assert load(tmp_path).tokens.tolist() == [
        [1, 10, 11, 12, 13],
        [14, 15, 16, 2, NO_TOKEN],
        [1, 18, 19, 2, NO_TOKEN],
    ]


def test_a_piece_too_short_to_teach_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_text("abcde")  # leaves a piece of two
    assert load(tmp_path).tokens.tolist() == [[1, 10, 11, 12, 13]]


def test_json_lines(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "abc"}\n\n{"input_ids": [5, 6, 7]}\n')
    assert load(path).tokens.tolist() == [[1, 10, 11, 12, 2], [5, 6, 7, NO_TOKEN, NO_TOKEN]]


def test_stored_tokens(tmp_path):
    path = tmp_path / "d.safetensors"
    sequences = [torch.arange(3, 7), torch.arange(20, 27)]
    data.save_tokens(path, sequences)
    tokens = data.load(path, None, 100, 5, 2).tokens
    assert tokens.tolist() == [
        [3, 4, 5, 6, NO_TOKEN],
        [20, 21, 22, 23, 24],
        [25, 26, NO_TOKEN, NO_TOKEN, NO_TOKEN],
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "abc"', ":2 is not JSON"),
        ("[1, 2]", ":2 has neither"),
        ('{"input_ids": [1, "x"]}', ":2 has neither"),
        ('{"input_ids": [1, -4, 3]}', ":2 has neither"),
        ('{"prompt": "abc"}', ":2 has neither"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, reason):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "abc"}) + "\n" + line + "\n")
    with pytest.raises(TrainError) as caught:
        load(path)
    assert f"{path}{reason}" in str(caught.value)


def test_wrong_inputs_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "short.jsonl").write_text('{"input_ids": [3]}\n')
    (tmp_path / "big.jsonl").write_text('{"input_ids": [3, 4, 100]}\n')
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\x00")
    safetensors.torch.save_file({"ids": torch.ones(2)}, tmp_path / "other.safetensors")
    for name, reason in {
        "missing.jsonl": "no training data",
        "empty": "holds no text files",
        "latin": "is not UTF-8",
        "a.csv": "is neither a folder",
        "short.jsonl": "no sequence of 3 tokens",
        "big.jsonl": "token id 100, but the target's vocabulary ends at 99",
        "torn.safetensors": "not a readable safetensors",
        "other.safetensors": "must hold `tokens`",
    }.items():
        with pytest.raises(TrainError, match=reason) as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_every_epoch_is_a_fresh_permutation():
    windows = Windows(torch.arange(10)[:, None])
    seen = torch.cat([windows.batch(step, 4, seed=0) for step in range(5)]).flatten()
    first, second = seen[:10].tolist(), seen[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_batch_is_a_function_of_its_step():
    windows = Windows(torch.arange(10)[:, None])
    in_order = [windows.batch(step, 3, seed=1) for step in range(9)]
    fresh = Windows(windows.tokens)
    assert all(torch.equal(fresh.batch(s, 3, seed=1), in_order[s]) for s in (8, 2, 5))
    assert not torch.equal(fresh.batch(0, 3, seed=2), in_order[0])


def test_counts_leave_out_padding():
    counts = Windows(torch.tensor([[3, 3, NO_TOKEN], [0, 3, 1]])).counts(5)
    assert counts.tolist() == [1, 1, 0, 3, 0]
