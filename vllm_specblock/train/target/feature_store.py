"""The target's features on disk, extracted once and read by row in training.

A feature folder holds

    features.json                origin of the features; written last: it marks a complete folder
    unfinished.json              the same, during extraction or after an interruption
    features-00000.safetensors   hidden [T, 3·Ht], last [T, Ht], tokens [T] int32,
    features-00001.safetensors   pieces [n, 3] int64 (sequence, start, length), lengths' sum = T
    ...

Every sequence is cut into consecutive pieces of at most `length` tokens; the target reads each
piece alone, from position 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.batch import Segment, segments_of

INDEX = "features.json"
UNFINISHED = "unfinished.json"


class Features(NamedTuple):
    """The target's features of T tokens. hidden: [T, 3·Ht]; last: [T, Ht], after the final norm."""

    hidden: Tensor
    last: Tensor


@dataclass(frozen=True)
class Origin:
    """Source of a folder's features: fingerprints of target and sequences, feature layers (i is
    the residual stream after i layers), torch's name of the dtype, tokens of the longest piece, and
    tokens with which a shard is full. Two folders of one origin hold the same numbers."""

    target: str
    data: str
    layer_ids: tuple[int, int, int]
    dtype: str
    length: int
    shard_tokens: int


def fingerprint(sequences: Iterable[Tensor]) -> str:
    """Return a hash of all tokens of `sequences` (each [T] of any integer dtype) and their cuts."""
    digest = hashlib.sha256()
    for tokens in sequences:
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(tokens.to(torch.int32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


def fill(
    folder: Path,
    origin: Origin,
    sequences: Sequence[Tensor],
    extract: Callable[[list[Tensor]], Iterable[Features]],
    progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Write all missing shards of `folder`, then mark it as complete.

    Args:
        sequences: each [T] of any integer dtype; those of `origin.data`.
        extract: pieces of tokens ([T] int64 each) -> their features, in order. It runs for one
            shard while the features of the previous one are read and written.
        progress: called with the number of tokens that each shard adds.
    """
    begin(folder, origin)
    groups = list(_shards_of(segments_of(sequences, origin.length), origin.shard_tokens))
    with ThreadPoolExecutor(max_workers=1) as writer:
        written = writer.submit(int)  # no tokens before the first shard
        for number, group in enumerate(groups):
            path = shard_path(folder, number)
            if path.exists():
                progress(sum(segment.length for segment in group))
                continue
            texts = [sequences[p.sequence][p.start : p.start + p.length].long() for p in group]
            features = extract(texts)
            progress(written.result())
            written = writer.submit(_write_shard, path, group, texts, features)
        progress(written.result())
    index = asdict(origin) | {"sequences": len(sequences), "shards": len(groups)}
    shards.write_json(folder / INDEX, index)
    (folder / UNFINISHED).unlink()


def begin(folder: Path, origin: Origin) -> bool:
    """Claim `folder` for features of `origin` and return whether it is complete; raises
    `TrainError` if it has another origin."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (INDEX, UNFINISHED):
        if (folder / name).exists():
            check(folder, shards.read_object(folder / name, asdict(origin)), **asdict(origin))
            if name == INDEX:
                return True
    shards.write_json(folder / UNFINISHED, asdict(origin))
    return False


def check(folder: Path, index: dict[str, Any], **expected: Any) -> None:
    """Raise `TrainError` if entries of a folder's index differ from those expected."""
    shards.check_same(
        f"The features in {folder} were extracted",
        index,
        expected,
        "extract them anew into another folder, or use what they were extracted with.",
        hidden={"target", "data"},
    )


def _shards_of(segments: Iterable[Segment], shard_tokens: int) -> Iterator[list[Segment]]:
    group: list[Segment] = []
    size = 0
    for segment in segments:
        group.append(segment)
        size += segment.length
        if size >= shard_tokens:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_shard(
    path: Path, segments: list[Segment], texts: list[Tensor], features: Iterable[Features]
) -> int:
    """Write one shard and return its number of tokens."""
    total = sum(segment.length for segment in segments)
    tensors: dict[str, Tensor] = {}
    end = 0
    for segment, part in zip(segments, features, strict=True):
        for name, rows in part._asdict().items():
            if len(rows) != segment.length:
                raise RuntimeError(f"{len(rows)} rows came for a piece of {segment.length} tokens")
            if name not in tensors:  # filled piece by piece, so that memory holds one shard only
                tensors[name] = rows.new_empty(total, rows.shape[1])
            tensors[name][end : end + segment.length] = rows
        end += segment.length
    tensors["tokens"] = torch.cat(texts).int()
    tensors["pieces"] = torch.tensor(segments)
    shards.replace(path, lambda aside: safetensors.torch.save_file(tensors, aside))
    return total


class FeatureStore:
    """Reads a complete feature folder by piece, as views of mapped files.

    Args:
        expected: entries of `Origin`.

    Raises:
        TrainError: the folder is incomplete, damaged, or of another origin.
    """

    def __init__(self, folder: Path, **expected: Any) -> None:
        self.folder = folder
        keys = ("shards", "sequences", "length")
        self.index = shards.read_index(folder, INDEX, "features", keys)
        check(folder, self.index, **expected)
        paths = (shard_path(folder, number) for number in range(self.index["shards"]))
        self._files = [shards.opened(path) for path in paths]
        self._places: dict[tuple[int, int], tuple[int, int, int]] = {}
        for number, file in enumerate(self._files):
            row = 0
            for sequence, start, length in file.get_tensor("pieces").tolist():
                self._places[sequence, start] = (number, row, length)
                row += length

    def read(self, segment: Segment) -> tuple[Features, Tensor]:
        """Features and tokens ([T] int32) of one piece, which may be shorter than the stored one:
        rows do not depend on later tokens. Raises `TrainError` where there is none."""
        number, row, length = self._places.get((segment.sequence, segment.start), (0, 0, 0))
        if segment.length > length:
            raise TrainError(
                f"The features in {self.folder} lack tokens {segment.start} to "
                f"{segment.start + segment.length - 1} of sequence {segment.sequence}: they were "
                f"extracted in pieces of {self.index['length']} tokens from "
                f"{self.index['sequences']} sequences, and training must use the same."
            )
        file, rows = self._files[number], slice(row, row + segment.length)
        features = Features(*(file.get_slice(name)[rows] for name in Features._fields))
        return features, file.get_slice("tokens")[rows]
