"""Packed dataset: windows of target tokens, in an order that depends only on the step."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.batch import NO_TOKEN, Batch, Segment, segments_of
from vllm_specblock.train.data.shards import Text


class PackedDataset:
    """Texts cut into pieces of at most `length` tokens, and pieces packed into windows of `length`
    columns (one each without `pack`). Pieces of fewer than `shortest` tokens are dropped, as are
    those in which no token after the second is counted."""

    def __init__(
        self, texts: Sequence[Text], length: int, shortest: int, pack: bool = True
    ) -> None:
        self.texts, self.length = texts, length
        segments = [
            segment
            for segment in segments_of((text.tokens for text in texts), length)
            if segment.length >= shortest and self._text(segment).loss_mask[2:].any()
        ]
        if not segments:
            raise TrainError(
                f"The data holds no sequence of {shortest} tokens or more with tokens to learn."
            )
        packed = [[number] for number in range(len(segments))]
        if pack:
            packed = pack_lengths([segment.length for segment in segments], length)
        self.plan = [tuple(segments[number] for number in window) for window in packed]
        self._permutation = lru_cache(maxsize=2)(self._shuffled)  # two, where epochs meet

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def num_tokens(self) -> int:
        """Tokens in all windows, without padding."""
        return sum(segment.length for window in self.plan for segment in window)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The `size` windows of batch `step` (0-based). Each epoch is a permutation seeded by
        (seed, epoch): a resumed run sees the batches of an unbroken one."""
        wanted = range(step * size, (step + 1) * size)
        return self.of(
            [int(self._permutation(seed, i // len(self))[i % len(self)]) for i in wanted]
        )

    def of(self, numbers: Sequence[int]) -> Batch:
        """Return windows by number, on the CPU."""
        shape = (len(numbers), self.length)
        tokens = torch.full(shape, NO_TOKEN)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        position = torch.zeros(shape, dtype=torch.int64)
        windows = tuple(self.plan[number] for number in numbers)
        for row, window in enumerate(windows):
            column = 0
            for segment in window:
                text, here = self._text(segment), slice(column, column + segment.length)
                tokens[row, here], loss_mask[row, here] = text.tokens, text.loss_mask
                position[row, here] = torch.arange(segment.length)
                column += segment.length
        return Batch(tokens, position, loss_mask, windows)

    def _text(self, segment: Segment) -> Text:
        text = self.texts[segment.sequence]
        here = slice(segment.start, segment.start + segment.length)
        return Text(text.tokens[here], text.loss_mask[here])

    def _shuffled(self, seed: int, epoch: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        return torch.randperm(len(self), generator=draw)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of all tokens, mask bits and windows."""
        digest = hashlib.sha256(repr(self.plan).encode())
        for text in self.texts:
            digest.update(text.tokens.long().numpy().tobytes())
            digest.update(text.loss_mask.numpy().tobytes())
        return digest.hexdigest()


def pack_lengths(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack pieces into windows of `room` columns, best fit, the longest first: the indices of each
    window's pieces, windows and their pieces in ascending order."""
    windows: list[list[int]] = []
    spaces: list[tuple[int, int, list[int]]] = []  # free columns, latest first, and the window
    for turn, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        at = bisect.bisect_left(spaces, (lengths[index], -len(lengths), []))
        if at < len(spaces):
            space, _, window = spaces.pop(at)
        else:
            space, window = room, []
            windows.append(window)
        window.append(index)
        if space > lengths[index]:
            bisect.insort(spaces, (space - lengths[index], -turn, window))
    return sorted(sorted(window) for window in windows)


def token_counts(texts: Sequence[Text], vocab_size: int) -> Tensor:
    """Return how often each target id is a label, [vocab_size] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.tokens[text.loss_mask].long(), minlength=vocab_size)
    return counts


def load_texts(path: Path, vocab_size: int) -> list[Text]:
    """Read the folder that `specblock data` wrote, or one `.safetensors` file (see `shards`).
    Raises `TrainError` if the data is missing, broken or empty."""
    if path.is_dir():
        found = shards.read(path)
    elif not path.is_file():
        raise TrainError(f"There is no training data at {path}.")
    elif path.suffix == ".safetensors":
        found = shards.read_shard(path)
    else:
        raise TrainError(
            f"{path} is neither a folder of shards nor a .safetensors file: `specblock data` makes "
            "one of texts, prompts and chats."
        )
    texts = [Text(text.tokens.int(), text.loss_mask) for text in found if len(text.tokens)]
    if not texts:
        raise TrainError(f"{path} holds no text.")
    shards.check_ids(path, (text.tokens for text in texts), vocab_size)
    return texts
