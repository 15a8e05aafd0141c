"""Tensors of a checkpoint folder by name, read on demand.

From `*.safetensors`, or else `pytorch_model*.bin`. An index of shards says which files count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_specblock.drafters.common.checkpoint_files import opened, stored_shapes
from vllm_specblock.drafters.specblock.config import CheckpointError
from vllm_specblock.drafters.specblock.config_json import read_json

_INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """A tensor in a file: its shape, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def rows(self, first: int, count: int) -> Stored:
        """Some of its rows."""
        return Stored((count, *self.shape[1:]), lambda: self.read()[first : first + count])


def stored_in(directory: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint in `directory`, by its name there.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    if files := _safetensors_files(directory):
        return {name: entry for path in files for name, entry in _safetensors(path).items()}
    if files := sorted(directory.glob("pytorch_model*.bin")):
        return {name: entry for path in files for name, entry in _pickled(path).items()}
    raise CheckpointError(
        f"There is neither a .safetensors file nor a pytorch_model.bin in {directory}."
    )


def _safetensors_files(directory: Path) -> list[Path]:
    if not (directory / _INDEX).is_file():
        return sorted(directory.glob("*.safetensors"))
    raw, where = read_json(directory / _INDEX)
    shards = raw.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{where} has no weight_map from tensors to files: write it anew.")
    names = sorted(set(shards.values()))
    # An index may name files of this folder only.
    missing = [n for n in names if Path(n).name != n or not (directory / n).is_file()]
    if missing:
        raise CheckpointError(
            f"{where} names {missing[0]}, which is no file in {directory}: download it again."
        )
    return [directory / name for name in names]


def _safetensors(path: Path) -> dict[str, Stored]:
    file = opened(path)
    return {
        name: Stored(shape, partial(file.get_tensor, name))
        for name, shape in stored_shapes(file).items()
    }


def _pickled(path: Path) -> dict[str, Stored]:
    try:
        # Mapped: bytes are read from the disk when a tensor is.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # on foreign bytes torch's unpickler fails with anything
        raise CheckpointError(
            f"{path} is not a plain dict of tensors (torch.load with weights_only=True and "
            f"mmap=True: {type(error).__name__}); save it anew, best as safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise CheckpointError(f"{path} is not a plain dict of tensors.")

    return {name: Stored(tuple(each.shape), each.detach) for name, each in tensors.items()}
