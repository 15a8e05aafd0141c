"""JetSpec checkpoints: DFlash's files, whose config.json says that blocks are causal."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_specblock.drafters.common.checkpoint_files import CONFIG, PathLike
from vllm_specblock.drafters.dflash.checkpoint import check_tensors, load_as
from vllm_specblock.drafters.dflash.config import DFlashShape, from_json
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.specblock.config_json import read_json

__all__ = ["check_tensors", "load", "read_config"]
"""What the registry asks of such a module; tensors have DFlash's names and shapes."""


def read_config(directory: PathLike) -> DFlashShape:
    """What the checkpoint's config.json says.

    Raises:
        CheckpointError: there is no config.json, or no JSON in it; not a JetSpec drafter, or a
            variant that is not supported.
    """
    return from_json(*read_json(Path(directory) / CONFIG), causal=True)


def load(
    directory: PathLike,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DFlashModel:
    """A drafter with its weights cast to `dtype`, on `device`; it wants the target's LM head.

    Raises:
        CheckpointError: as `read_config` and `check_tensors`.
    """
    return load_as(read_config(directory), directory, dtype, device)
