"""DFlash checkpoints. They hold neither an embedding nor an LM head."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vllm_specblock.drafters.common.checkpoint_files import CheckpointReader, Tensors
from vllm_specblock.drafters.common.rope import rewritten
from vllm_specblock.drafters.dflash.config import DFlashShape, from_json
from vllm_specblock.drafters.dflash.model import DFlashModel


def _model(config: DFlashShape, names: Collection[str]) -> DFlashModel:
    return DFlashModel(config)


def _named(found: Tensors, config: DFlashShape, directory: Path) -> Tensors:
    return {name.removeprefix("model."): entry for name, entry in found.items()}


FILES = CheckpointReader(from_json, _model, _named, rewritten)
