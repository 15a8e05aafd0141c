"""SpecBlock checkpoints; `train/saving.py` writes them.

Both layouts hold `config.json` and `model.safetensors`, with the same tensor names. The published
one adds `vocab_mapping.pt`, which wins over d2t and t2d in the safetensors file.
"""

from __future__ import annotations

from pathlib import Path

from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    WEIGHTS,
    CheckpointReader,
    Tensors,
    with_mapping,
)
from vllm_specblock.drafters.common.config import read_json
from vllm_specblock.drafters.specblock.config import DrafterConfig, from_json, layout_of
from vllm_specblock.drafters.specblock.model import SpecBlockModel


def _named(found: Tensors, config: DrafterConfig, directory: Path) -> Tensors:
    published = layout_of(*read_json(directory / CONFIG)) == "published"
    return with_mapping(found, directory, config.draft_vocab_size, config.vocab_size, published)


_FILES = CheckpointReader(
    from_json, lambda config, names: SpecBlockModel(config), _named, weights=WEIGHTS
)
read_config, check_tensors = _FILES.read_config, _FILES.check_tensors
read_tensors, load = _FILES.read_tensors, _FILES.load
