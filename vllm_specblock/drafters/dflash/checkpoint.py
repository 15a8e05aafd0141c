"""DFlash checkpoints: detect, check and load. They hold neither an embedding nor an LM head."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    PathLike,
    check_names,
    check_shapes,
    wanted_shapes,
    with_weights,
)
from vllm_specblock.drafters.common.rope import attention_factor
from vllm_specblock.drafters.common.stored import Stored, stored_in
from vllm_specblock.drafters.dflash import config as config_json
from vllm_specblock.drafters.dflash.config import DFlashShape
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.specblock.config_json import read_json


def read_config(directory: PathLike, causal: bool = False) -> DFlashShape:
    """What the checkpoint's config.json says; causal: whether its blocks have to be, as JetSpec's.

    Raises:
        CheckpointError: there is no config.json, or no JSON in it; not a DFlash drafter, or a
            variant that is not supported.
    """
    return config_json.from_json(*read_json(Path(directory) / CONFIG), causal)


def check_tensors(directory: PathLike, config: DFlashShape) -> None:
    """Hold the tensors' names and shapes against `config` without reading the weights.

    Raises:
        CheckpointError: a file is missing or unreadable, tensors are missing, left over or of
            another shape.
    """
    _checked(Path(directory), config)


def load(
    directory: PathLike,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    causal: bool = False,
) -> DFlashModel:
    """A drafter with its weights cast to `dtype`, on `device`; it wants the target's LM head.

    Raises:
        CheckpointError: as `read_config` and `check_tensors`.
    """
    config = read_config(directory, causal)
    stored = _checked(Path(directory), config)
    tensors = {name: entry.read() for name, entry in stored.items()}
    return with_weights(partial(DFlashModel, config), _scaled(tensors, config), dtype, device)


def _checked(directory: Path, config: DFlashShape) -> dict[str, Stored]:
    """The drafter's tensors under its own names; none has been read."""
    stored = {name.removeprefix("model."): entry for name, entry in stored_in(directory).items()}
    wanted = wanted_shapes(partial(DFlashModel, config))
    shapes = {name: entry.shape for name, entry in stored.items()}
    check_names(shapes, wanted, directory)
    check_shapes(shapes, wanted, directory)
    return stored


def _scaled(tensors: dict[str, Tensor], config: DFlashShape) -> dict[str, Tensor]:
    """With YaRN's factor on cos and sin in the norms of what they turn."""
    factor = attention_factor(config.rope_scaling)
    norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    return {
        name: tensor.float() * factor if factor != 1 and name.endswith(norms) else tensor
        for name, tensor in tensors.items()
    }
