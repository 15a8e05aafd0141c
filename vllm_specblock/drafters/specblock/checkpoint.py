"""SpecBlock checkpoints: read, check and write.

Both layouts hold `config.json` and `model.safetensors`, with the same tensor names. The published
one adds `vocab_mapping.pt`, which wins over d2t and t2d in the safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    MAPPING,
    MAPPING_NAMES,
    WEIGHTS,
    CheckpointReader,
    PathLike,
    Tensors,
    with_mapping,
)
from vllm_specblock.drafters.common.config import CheckpointError, read_json
from vllm_specblock.drafters.specblock.config import (
    DrafterConfig,
    Layout,
    TargetInfo,
    from_json,
    layout_of,
    to_json,
)
from vllm_specblock.drafters.specblock.model import SpecBlockModel


def _named(found: Tensors, config: DrafterConfig, directory: Path) -> Tensors:
    published = layout_of(*read_json(directory / CONFIG)) == "published"
    return with_mapping(found, directory, config.draft_vocab_size, config.vocab_size, published)


_FILES = CheckpointReader(
    from_json, lambda config, names: SpecBlockModel(config), _named, weights=WEIGHTS
)
read_config, check_tensors = _FILES.read_config, _FILES.check_tensors
read_tensors, load = _FILES.read_tensors, _FILES.load


def save(drafter: SpecBlockModel, directory: PathLike, layout: Layout = "ours") -> None:
    """Write a drafter directory, file by file; raises as `to_json`."""
    _write(drafter.config, drafter.state_dict(), Path(directory), layout)


def convert(
    source: PathLike, destination: PathLike, to: Layout, target: TargetInfo | None = None
) -> None:
    """Rewrite a drafter directory in the layout `to`; weights keep their bits.

    target: what the new config says of the target; None: as before. Raises CheckpointError as
    `read_config`, `check_tensors` and `save`.
    """
    if Path(source).resolve() == Path(destination).resolve():
        raise CheckpointError(f"{source} cannot be converted into itself: give another --out.")
    config = read_config(source)
    if target is not None:
        config = config.model_copy(update={"target": target})
    _write(config, read_tensors(source, config), Path(destination), to)


def _write(
    config: DrafterConfig, tensors: dict[str, Tensor], directory: Path, layout: Layout
) -> None:
    dtype = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
    raw = to_json(config, layout, dtype)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"}))
    if layout == "published":
        mapping = {name: tensors[name] for name in MAPPING_NAMES}
        _replace(directory / MAPPING, lambda path: torch.save(mapping, path))
    text = json.dumps(raw, indent=2) + "\n"
    _replace(directory / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    # By a rename, so that the file is always whole.
    aside = path.with_name(f".{path.name}.part")
    aside.touch()
    mode = aside.stat().st_mode
    write(aside)
    aside.chmod(mode)  # safetensors leaves files that only their owner can read
    aside.replace(path)
