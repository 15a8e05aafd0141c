"""Training text on disk: tokenised sequences with their loss masks, in shards.

A data folder holds

    data.json                 what it was made for and from; written last: the folder is whole
    shard-00000.safetensors   tokens [T] int32, counted [T] uint8, lengths [n] int64, sum = T
    shard-00001.safetensors   ...
    vocab.safetensors         counts [V] int64, how often each target id is counted
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError

INDEX = "data.json"
VOCAB = "vocab.safetensors"


class Text(NamedTuple):
    """One sequence. tokens: [T] int64; counted: [T] bool, the target wrote this token."""

    tokens: Tensor
    loss_mask: Tensor


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(path: Path, texts: Sequence[Text], facts: dict[str, int] | None = None) -> None:
    """Write one shard, aside and renamed: a kill leaves no half of one.

    `texts` may be empty. `facts` are numbers about the making, for `read_facts`.
    """
    tensors = {
        "tokens": torch.cat([torch.empty(0).long(), *(text.tokens for text in texts)]).int(),
        "counted": torch.cat([torch.empty(0).bool(), *(text.loss_mask for text in texts)]).byte(),
        "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int64),
    }
    # One key: safetensors writes several in no fixed order, and equal shards are equal bytes.
    metadata = {"facts": json.dumps(facts or {}, sort_keys=True)}
    replace(path, lambda aside: safetensors.torch.save_file(tensors, aside, metadata))


def read_facts(path: Path) -> dict[str, int]:
    """What `write_shard` was told beside the texts.

    Raises:
        TrainError: it is no such file.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {}).get("facts", "{}"))
    except (safetensors.SafetensorError, FileNotFoundError) as error:
        raise TrainError(f"{path} is not a readable safetensors file: {error}.") from None


def read_shard(path: Path) -> Iterator[Text]:
    """The sequences of one file: a shard, or any file with `tokens` and `lengths`, all counted.

    Raises:
        TrainError: it is no such file.
    """
    try:
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, FileNotFoundError) as error:
        raise TrainError(f"{path} is not a readable safetensors file: {error}.") from None
    tokens, lengths = tensors.get("tokens"), tensors.get("lengths")
    if tokens is None or lengths is None or int(lengths.sum()) != len(tokens):
        raise TrainError(f"{path} must hold `tokens` [T] and `lengths` [N] with sum(lengths) = T.")
    if len(tokens) and int(tokens.min()) < 0:
        raise TrainError(f"{path} holds the negative token id {int(tokens.min())}.")
    loss_mask = tensors.get("counted", torch.ones_like(tokens)).bool()
    if len(loss_mask) != len(tokens):
        raise TrainError(f"{path} counts {len(loss_mask)} tokens, but holds {len(tokens)}.")
    sizes = lengths.tolist()
    return (Text(*pair) for pair in zip(tokens.long().split(sizes), loss_mask.split(sizes)))


def read(folder: Path) -> Iterator[Text]:
    """All sequences of a data folder, shard after shard.

    Raises:
        TrainError: the folder is not whole, or a shard is damaged.
    """
    for number in range(read_index(folder)["shards"]):
        yield from read_shard(shard_path(folder, number))


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Mark `folder` as whole. `index["shards"]` says how many shards it has."""
    text = json.dumps(index, indent=1) + "\n"
    replace(folder / INDEX, lambda aside: aside.write_text(text, encoding="utf-8"))


def read_index(folder: Path) -> dict[str, Any]:
    """data.json of a data folder; raises `TrainError` if it is not there."""
    try:
        return json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainError(
            f"There is no {INDEX} in {folder}: `specblock data` has not been here, or was stopped "
            "before its end (run it again with the same options and it goes on)."
        ) from None
    except json.JSONDecodeError as error:
        raise TrainError(f"{folder / INDEX} is not JSON: {error}.") from None


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place in one step."""
    aside = path.with_name(f".{path.name}.part")
    write(aside)
    aside.replace(path)
