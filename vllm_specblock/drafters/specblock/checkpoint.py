"""SpecBlock checkpoints: read, check, write and convert.

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
    PathLike,
    Shapes,
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
from vllm_specblock.drafters.common.target_info import check_target, describe_target
from vllm_specblock.drafters.specblock.config import CheckpointError, DrafterConfig
from vllm_specblock.drafters.specblock.config_json import (
    Layout,
    from_json,
    layout_of,
    read_json,
    to_json,
)
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.untrained import init

__all__ = [
    "CONFIG",
    "MAPPING",
    "WEIGHTS",
    "CheckpointError",
    "check_tensors",
    "convert",
    "init",
    "load",
    "opened",
    "read_config",
    "read_tensors",
    "save",
]


def read_config(directory: PathLike) -> DrafterConfig:
    """The config of a drafter directory in either layout.

    Raises:
        CheckpointError: no such file, no JSON, or not what a SpecBlock drafter's config says.
    """
    return from_json(*read_json(Path(directory) / CONFIG))


def check_tensors(directory: PathLike, config: DrafterConfig) -> None:
    """Check the tensors' names and shapes against `config` without reading the weights.

    Raises:
        CheckpointError: a file is missing or unreadable, tensors are missing, left over or of
            another shape, or the vocabulary mapping is not one.
    """
    path = Path(directory) / WEIGHTS
    with opened(path) as file:
        shapes = stored_shapes(file)
        mapping = {name: file.get_tensor(name) for name in MAPPING_NAMES if name in shapes}
    mapping |= _mapping_file(Path(directory))
    mapping = mapping or identity_mapping(config.draft_vocab_size, config.vocab_size)
    shapes |= {name: tuple(tensor.shape) for name, tensor in mapping.items()}
    _check_shapes(shapes, config, path)
    check_mapping(mapping["d2t"], mapping["t2d"], directory)


def read_tensors(directory: PathLike, config: DrafterConfig) -> dict[str, Tensor]:
    """All tensors of a drafter directory on the CPU, checked, in the dtypes they are stored in.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    check_tensors(directory, config)
    with opened(Path(directory) / WEIGHTS) as file:
        tensors = stored_tensors(file)
    identity = identity_mapping(config.draft_vocab_size, config.vocab_size)
    return identity | tensors | _mapping_file(Path(directory))


def load(
    directory: PathLike,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> SpecBlockModel:
    """A drafter with its weights cast to `dtype`, on `device`.

    Raises:
        CheckpointError: as `read_config` and `check_tensors`.
    """
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    return with_weights(lambda: SpecBlockModel(config), tensors, dtype, device)


def save(drafter: SpecBlockModel, directory: PathLike, layout: Layout = "ours") -> None:
    """Write a drafter directory; files that are there already are replaced whole.

    Raises:
        CheckpointError: the published layout has no place for this drafter.
    """
    _write(drafter.config, drafter.state_dict(), Path(directory), layout)


def convert(
    source: PathLike,
    destination: PathLike,
    to: Layout,
    target: PathLike | None = None,
    target_name: str | None = None,
    layer_ids: tuple[int, int, int] | None = None,
) -> DrafterConfig:
    """Rewrite a drafter directory in the layout `to`; weights keep their bits.

    Args:
        source, destination: two different directories.
        target: directory of the target, whose name and layers the published layout leaves out.
        target_name: default: `target` as given.
        layer_ids: layers that are read (default: those in `source`, else the target's default).

    Returns:
        The config as written.

    Raises:
        CheckpointError: as `read_config`, `check_tensors` and `save`; `target` has other sizes,
            or is missing where its name or layers are given.
    """
    if Path(source).resolve() == Path(destination).resolve():
        raise CheckpointError(f"{source} cannot be converted into itself: give another --out.")
    if target is None and (target_name is not None or layer_ids is not None):
        raise CheckpointError("The target's name and layers were given without --target.")
    config = read_config(source)
    if target is not None:
        layer_ids = layer_ids or config.target.layer_ids
        info = describe_target(target, target_name, layer_ids)
        check_target(source, config.target, target, info)
        config = config.model_copy(update={"target": info})
    _write(config, read_tensors(source, config), Path(destination), to)
    return config


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


def _mapping_file(directory: Path) -> dict[str, Tensor]:
    """d2t and t2d of vocab_mapping.pt; empty where the layout or the directory has none."""
    if not (directory / MAPPING).is_file() or layout_of(*read_json(directory / CONFIG)) == "ours":
        return {}
    return read_mapping(directory)


def _check_shapes(found: Shapes, config: DrafterConfig, path: Path) -> None:
    wanted = wanted_shapes(lambda: SpecBlockModel(config))
    check_names(found, wanted, path)
    queries = found["input_layer.position_queries.weight"]
    if queries[:1] != (config.block_size,):
        raise CheckpointError(
            f"{path} holds queries for {queries[0] if queries else 0} draft positions, but K in "
            f"its {CONFIG} (block_size, or diffspec_draft_token_num) is {config.block_size}."
        )
    check_shapes(found, wanted, path)
