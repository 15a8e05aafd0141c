"""Folders of drafters as the learners write them; what is there already is replaced whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from vllm_specblock.drafters.common.checkpoint_files import CONFIG, MAPPING, WEIGHTS
from vllm_specblock.drafters.detect import KIND
from vllm_specblock.train.data.shards import replace, write_json


def write_folder(
    directory: Path, kind: str | None, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """config.json and model.safetensors, floating-point tensors in bf16.

    kind: None where the layout of config.json names the drafter by itself.
    """
    stored = {
        name: (value.bfloat16() if value.is_floating_point() else value).detach().cpu().clone()
        for name, value in tensors.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    replace(
        directory / WEIGHTS,
        lambda aside: safetensors.torch.save_file(stored, aside, {"format": "pt"}),
    )
    named = {} if kind is None else {KIND: kind}
    write_json(directory / CONFIG, config | named | {"torch_dtype": "bfloat16"})


def write_mapping(directory: Path, d2t: Tensor, t2d: Tensor) -> None:
    """The draft vocabulary, for a folder whose tensors are another engine's."""
    mapping = {"d2t": d2t.cpu().clone(), "t2d": t2d.cpu().clone()}
    replace(directory / MAPPING, lambda aside: torch.save(mapping, aside))
