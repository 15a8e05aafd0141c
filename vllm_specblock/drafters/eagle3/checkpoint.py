"""EAGLE-3 checkpoints: detect, check and load.

The tensors lie in `*.safetensors`, or else in `pytorch_model*.bin`. The layer is called
`midlayer` or `layers.0`, with or without `model.` before it, and its projections may be fused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    PathLike,
    check_names,
    check_shapes,
    opened,
    wanted_shapes,
    with_weights,
)
from vllm_specblock.drafters.eagle3 import config_json
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.specblock.config import CheckpointError
from vllm_specblock.drafters.specblock.config_json import read_json

_UNUSED = ("t2d", "mask_hidden", "rotary_emb.inv_freq")
"""Tensors that say nothing to a plain EAGLE-3 drafter: the mapping's other direction, what
parallel drafting reads, and RoPE, which is computed."""
_EMBEDDING, _MAPPING = "embed_tokens.weight", "d2t"


class _Stored(NamedTuple):
    """A tensor in a file: its shape, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def is_eagle3(directory: PathLike) -> bool:
    """Whether the checkpoint in `directory` is an EAGLE head, by its config.json alone.

    Raises:
        CheckpointError: there is no config.json, or no JSON in it.
    """
    return config_json.is_eagle3(read_json(Path(directory) / CONFIG)[0])


def read_config(directory: PathLike) -> Eagle3Shape:
    """What the checkpoint's config.json says.

    Raises:
        CheckpointError: as `is_eagle3`; not an EAGLE-3 head, or a variant that is not supported.
    """
    return config_json.from_json(*read_json(Path(directory) / CONFIG))


def check_tensors(directory: PathLike, config: Eagle3Shape) -> None:
    """Hold the tensors' names and shapes against `config` without reading the weights.

    Raises:
        CheckpointError: a file is missing or unreadable, tensors are missing, left over or of
            another shape, or the vocabulary mapping is not one.
    """
    _checked(Path(directory), config)


def read_tensors(directory: PathLike, config: Eagle3Shape) -> dict[str, Tensor]:
    """The tensors as they are stored, under the drafter's own names.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    return {name: entry.read() for name, entry in _checked(Path(directory), config).items()}


def load(
    directory: PathLike,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Model:
    """A drafter with its weights cast to `dtype`, on `device`.

    Raises:
        CheckpointError: as `read_config` and `check_tensors`.
    """
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    own = _EMBEDDING in tensors
    return with_weights(lambda: Eagle3Model(config, own_embedding=own), tensors, dtype, device)


def _checked(directory: Path, config: Eagle3Shape) -> dict[str, _Stored]:
    """The drafter's tensors under its own names; the mapping alone has been read."""
    stored = _named(_stored(directory), config)
    full = config.draft_vocab_size == config.vocab_size
    if full and _MAPPING not in stored:
        zeros = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        stored[_MAPPING] = _Stored(tuple(zeros.shape), lambda: zeros)
    # The target's embedding will do only where it is as wide.
    own = _EMBEDDING in stored or config.hidden_size != config.target_hidden_size
    wanted = wanted_shapes(lambda: Eagle3Model(config, own_embedding=own))
    found = {name: entry.shape for name, entry in stored.items()}
    check_names(found, wanted, directory)
    check_shapes(found, wanted, directory)
    _check_mapping(stored[_MAPPING].read(), config.vocab_size, directory)
    return stored


def _stored(directory: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint, by the name that it has there."""
    if files := sorted(directory.glob("*.safetensors")):
        return {name: entry for path in files for name, entry in _safetensors(path).items()}
    if files := sorted(directory.glob("pytorch_model*.bin")):
        return {name: entry for path in files for name, entry in _pickled(path).items()}
    raise CheckpointError(
        f"There is neither a .safetensors file nor a pytorch_model.bin in {directory}."
    )


def _safetensors(path: Path) -> dict[str, _Stored]:
    file = opened(path)

    def entry(name: str) -> _Stored:
        shape = tuple(file.get_slice(name).get_shape())
        return _Stored(shape, lambda: file.get_tensor(name))

    return {name: entry(name) for name in file.keys()}  # noqa: SIM118


def _pickled(path: Path) -> dict[str, _Stored]:
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

    def entry(tensor: Tensor) -> _Stored:
        return _Stored(tuple(tensor.shape), lambda: tensor)

    return {name: entry(tensor) for name, tensor in tensors.items()}


def _named(stored: dict[str, _Stored], config: Eagle3Shape) -> dict[str, _Stored]:
    """The same under the drafter's names, unused ones left out and fused ones taken apart."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    fused = {
        ".qkv_proj.": {".q_proj.": heads, ".k_proj.": kv_heads, ".v_proj.": kv_heads},
        ".gate_up_proj.": {
            ".gate_proj.": config.intermediate_size,
            ".up_proj.": config.intermediate_size,
        },
    }
    out = {}
    for name, entry in stored.items():
        if any(part in name for part in _UNUSED):
            continue
        name = name.removeprefix("model.")
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        whole = next((key for key in fused if key in name), None)
        if whole is None or entry.shape[:1] != (sum(fused[whole].values()),):
            out[name] = entry
            continue
        first = 0
        for part, rows in fused[whole].items():
            out[name.replace(whole, part)] = _rows(entry, first, rows)
            first += rows
    return out


def _rows(entry: _Stored, first: int, count: int) -> _Stored:
    return _Stored((count, *entry.shape[1:]), lambda: entry.read()[first : first + count])


def _check_mapping(d2t: Tensor, vocab_size: int, directory: Path) -> None:
    """d2t [Vd]: draft id + offset must be different target ids."""
    targets = torch.arange(len(d2t)) + d2t
    if d2t.dtype.is_floating_point or not (
        0 <= targets.min() <= targets.max() < vocab_size and len(targets.unique()) == len(targets)
    ):
        raise CheckpointError(
            f"The vocabulary mapping d2t in {directory} is none: draft id + d2t must be different "
            f"target ids below {vocab_size} (d2t holds offsets, not ids)."
        )
