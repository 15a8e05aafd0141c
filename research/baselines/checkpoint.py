"""Checkpoints of baseline drafters: detect, check and load.

`config.json` names the kind under `specblock_head`, and `model.safetensors` holds the weights. The
draft vocabulary may be in `vocab_mapping.pt`; without one the drafter names every token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from baselines.falcon import FalconModel
from baselines.groups import FalconShape, MedusaShape
from baselines.medusa import MedusaModel
from baselines.parallelspec import ParallelSpecModel
from vllm_specblock.drafters.common.checkpoint_files import (
    MAPPING_NAMES,
    WEIGHTS,
    CheckpointReader,
    Tensors,
    with_mapping,
)
from vllm_specblock.drafters.common.config import CheckpointError, checked
from vllm_specblock.drafters.detect import KIND
from vllm_specblock.drafters.specblock.config import DrafterConfig

Shape = MedusaShape | DrafterConfig

_KINDS: dict[str, tuple[type[Shape], type[nn.Module]]] = {
    "medusa": (MedusaShape, MedusaModel),
    "parallelspec": (DrafterConfig, ParallelSpecModel),
    "falcon": (FalconShape, FalconModel),
}
_NETWORKS = dict(_KINDS.values())
_HEAD = "lm_head.weight"


def _from_json(raw: dict[str, Any], where: str) -> Shape:
    kind = raw.get(KIND)
    if kind not in _KINDS:
        raise CheckpointError(
            f"{where} has {KIND} = {kind!r}, but it must be one of {', '.join(_KINDS)}."
        )
    shape, _ = _KINDS[kind]
    keys = {key: value for key, value in raw.items() if key in shape.model_fields}
    return checked(where, keys, shape)


def _named(found: Tensors, config: Shape, directory: Path) -> Tensors:
    count, vocab_size = config.draft_vocab_size, config.vocab_size
    tensors = with_mapping(found, directory, count, vocab_size)
    if not tensors.keys() >= set(MAPPING_NAMES):
        raise CheckpointError(
            f"{directory} names a draft vocabulary of {count} tokens, but says nowhere which they "
            "are (d2t and t2d)."
        )
    t2d, head = tensors["t2d"], tensors.get(_HEAD)
    if t2d.shape == (vocab_size,):
        del tensors["t2d"]
    # vLLM's Medusa reads an LM head over the whole vocabulary.
    if head is not None and isinstance(config, MedusaShape) and head.shape[0] == vocab_size:
        shape = (count, *head.shape[1:])
        tensors[_HEAD] = head._replace(shape=shape, read=lambda: head.read()[t2d.read()])
    return tensors


FILES = CheckpointReader(
    _from_json, lambda config, names: _NETWORKS[type(config)](config), _named, weights=WEIGHTS
)
