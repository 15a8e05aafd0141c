"""Checkpoints of baseline drafters: detect, check and load.

`config.json` names the kind under `specblock_head`, and `model.safetensors` holds the weights. The
draft vocabulary may be in `vocab_mapping.pt`; without one the drafter names every token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baselines.config import FalconShape, MedusaShape, SmallShape
from baselines.falcon import FalconModel
from baselines.medusa import MedusaModel
from baselines.parallelspec import ParallelSpecModel
from baselines.sps import SmallLanguageModel
from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    MAPPING_NAMES,
    WEIGHTS,
    PathLike,
    check_mapping,
    check_names,
    check_shapes,
    identity_mapping,
    opened,
    read_mapping,
    stored_shapes,
    stored_tensors,
    wanted_shapes,
    with_weights,
)
from vllm_specblock.drafters.detect import KIND
from vllm_specblock.drafters.specblock.config import CheckpointError, DrafterConfig
from vllm_specblock.drafters.specblock.config_json import checked, read_json, rope_of

Shape = MedusaShape | DrafterConfig | SmallShape

_SHAPES: dict[str, type[Shape]] = {
    "medusa": MedusaShape,
    "parallelspec": DrafterConfig,
    "falcon": FalconShape,
    "sps": SmallShape,
}
_MODELS: dict[type[Shape], type[nn.Module]] = {
    MedusaShape: MedusaModel,
    DrafterConfig: ParallelSpecModel,
    FalconShape: FalconModel,
    SmallShape: SmallLanguageModel,
}
_HEAD = "lm_head.weight"


def read_config(directory: PathLike) -> Shape:
    """What the folder's config.json says, as the shape of its kind.

    Raises:
        CheckpointError: there is no config.json, no JSON in it, or a kind that is not known; a key
            missing or out of range.
    """
    raw, where = read_json(Path(directory) / CONFIG)
    kind = raw.get(KIND)
    if kind not in _SHAPES:
        raise CheckpointError(
            f"{where} has {KIND} = {kind!r}, but it must be one of {', '.join(_SHAPES)}."
        )
    if kind == "sps":
        raw = _of_llama(raw, Path(directory))
    shape = _SHAPES[kind]
    keys = {key: value for key, value in raw.items() if key in shape.model_fields}
    return checked(where, keys, shape)


def check_tensors(directory: PathLike, config: Shape) -> None:
    """Hold the tensors' names and shapes against `config` without reading the weights.

    Raises:
        CheckpointError: a file is missing or unreadable, tensors are missing, left over or of
            another shape, or the vocabulary mapping is not one.
    """
    path = Path(directory) / WEIGHTS
    with opened(path) as file:
        found = stored_shapes(file)
    mapping = _mapping(Path(directory), config)
    found |= {name: tuple(tensor.shape) for name, tensor in mapping.items()}
    wanted = wanted_shapes(lambda: _drafter(config))
    wanted["t2d"] = (config.vocab_size,)
    if _whole_head(config):
        wanted[_HEAD] = (config.vocab_size, config.hidden_size)
    check_names(found, wanted, directory)
    check_shapes(found, wanted, directory)
    check_mapping(mapping["d2t"], mapping["t2d"], directory)


def read_tensors(directory: PathLike, config: Shape) -> dict[str, Tensor]:
    """The drafter's tensors under its own names, in the dtypes they are stored in.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    check_tensors(directory, config)
    with opened(Path(directory) / WEIGHTS) as file:
        tensors = stored_tensors(file)
    mapping = _mapping(Path(directory), config)
    if _whole_head(config):
        tensors[_HEAD] = tensors[_HEAD][mapping["t2d"]]
    tensors.pop("t2d", None)
    return tensors | {"d2t": mapping["d2t"]}


def load(
    directory: PathLike,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A drafter with its weights cast to `dtype`, on `device`.

    Raises:
        CheckpointError: as `read_config` and `check_tensors`.
    """
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    return with_weights(lambda: _drafter(config), tensors, dtype, device)


def _drafter(config: Shape) -> nn.Module:
    return _MODELS[type(config)](config)


def _whole_head(config: Shape) -> bool:
    """Whether the file holds an LM head over the whole vocabulary, since vLLM's Medusa reads it."""
    return isinstance(config, MedusaShape)


def _mapping(directory: Path, config: Shape) -> dict[str, Tensor]:
    """d2t [Vd] int64 and t2d [V] bool; of every token where the folder names none."""
    with opened(directory / WEIGHTS) as file:
        found = {name: file.get_tensor(name) for name in MAPPING_NAMES if name in file.keys()}  # noqa: SIM118
    found = found or read_mapping(directory)
    found = found or identity_mapping(config.draft_vocab_size, config.vocab_size)
    if found.keys() != set(MAPPING_NAMES):
        raise CheckpointError(
            f"{directory} names a draft vocabulary of {config.draft_vocab_size} tokens, but says "
            "nowhere which they are (d2t and t2d)."
        )
    return found


def _of_llama(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A Llama's config.json in the words of `SmallShape`."""
    theta, scaling = rope_of(raw)
    mapping = read_mapping(directory)
    heads = raw.get("num_attention_heads")
    return raw | {
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "draft_vocab_size": len(mapping["d2t"]) if mapping else raw.get("vocab_size"),
    }
