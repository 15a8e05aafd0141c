"""Checkpoints of baseline drafters: detect, check and load.

`config.json` names the kind under `specblock_head`, and `model.safetensors` holds the weights. The
draft vocabulary may be in `vocab_mapping.pt`; without one the drafter names every token.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baselines.config import FalconShape, MedusaShape, SmallShape
from baselines.falcon import FalconModel
from baselines.medusa import MedusaModel
from baselines.parallelspec import ParallelSpecModel
from baselines.sps import SmallLanguageModel
from vllm_specblock.drafters.common.checkpoint_files import (
    MAPPING_NAMES,
    PathLike,
    check_mapping,
    identity_mapping,
    read_mapping,
    with_weights,
)
from vllm_specblock.drafters.common.stored import Stored
from vllm_specblock.drafters.detect import KIND
from vllm_specblock.drafters.published.checkpoint import CheckpointReader
from vllm_specblock.drafters.specblock.config import CheckpointError, DrafterConfig
from vllm_specblock.drafters.specblock.config_json import checked, rope_of

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


def _from_json(raw: dict[str, Any], where: str) -> Shape:
    kind = raw.get(KIND)
    if kind not in _SHAPES:
        raise CheckpointError(
            f"{where} has {KIND} = {kind!r}, but it must be one of {', '.join(_SHAPES)}."
        )
    if kind == "sps":
        raw = _of_llama(raw, Path(where).parent)
    shape = _SHAPES[kind]
    keys = {key: value for key, value in raw.items() if key in shape.model_fields}
    return checked(where, keys, shape)


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


def _drafter(config: Shape, names: Collection[str] = ()) -> nn.Module:
    return _MODELS[type(config)](config)


def _named(found: dict[str, Stored], config: Shape, directory: Path) -> dict[str, Stored]:
    """The tensors with the mapping; a Medusa's LM head, which vLLM's reads whole, by its rows."""
    mapping = {name: found.pop(name).read() for name in MAPPING_NAMES if name in found}
    mapping = mapping or read_mapping(directory)
    mapping = mapping or identity_mapping(config.draft_vocab_size, config.vocab_size)
    if mapping.keys() != set(MAPPING_NAMES):
        raise CheckpointError(
            f"{directory} names a draft vocabulary of {config.draft_vocab_size} tokens, but says "
            "nowhere which they are (d2t and t2d)."
        )
    d2t, t2d = mapping["d2t"], mapping["t2d"]
    check_mapping(d2t, t2d, directory)
    found["d2t"] = Stored(tuple(d2t.shape), lambda: d2t)
    head = found.get(_HEAD)
    if isinstance(config, MedusaShape) and head is not None and head.shape[0] == len(t2d):
        found[_HEAD] = Stored((len(d2t), *head.shape[1:]), lambda: head.read()[t2d])
    return found


_FILES = CheckpointReader(_from_json, _drafter, _named)
read_config, check_tensors = _FILES.read_config, _FILES.check_tensors
read_tensors = _FILES.read_tensors


def load(
    directory: PathLike, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> nn.Module:
    """A drafter with its weights cast to `dtype`, on `device`."""
    config = read_config(directory)
    return with_weights(lambda: _drafter(config), read_tensors(directory, config), dtype, device)
