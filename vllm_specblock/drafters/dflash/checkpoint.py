"""DFlash checkpoints. They hold neither an embedding nor an LM head."""

from __future__ import annotations

from collections.abc import Collection

from vllm_specblock.drafters.dflash.config import DFlashShape, from_json
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.published.checkpoint import CheckpointReader


def _model(config: DFlashShape, names: Collection[str]) -> DFlashModel:
    return DFlashModel(config)


FILES = CheckpointReader(from_json, _model)
