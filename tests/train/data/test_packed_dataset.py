from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.packed_dataset import (
    PackedDataset,
    load_texts,
    pack_lengths,
)
from vllm_specblock.train.data.shards import Text


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
    with pytest.raises(TrainError, match=r"no data\.json .* stopped before its end"):
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
