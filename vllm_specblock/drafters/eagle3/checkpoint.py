"""EAGLE-3 checkpoints: detect, check and load.

The first layer is called `midlayer` or `layers.0`, with or without `model.` before it, and
projections may be fused. Embedding, LM head and vocabulary mapping are there or are not.
"""

from __future__ import annotations

from collections.abc import Collection
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
from vllm_specblock.drafters.common.stored import Stored, stored_in
from vllm_specblock.drafters.eagle3 import config_json
from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.eagle3.rewritten import rewritten
from vllm_specblock.drafters.specblock.config import CheckpointError
from vllm_specblock.drafters.specblock.config_json import read_json

_UNUSED = ("t2d", "mask_hidden", "rotary_emb.inv_freq")
"""Tensors that say nothing to a plain EAGLE-3 drafter: the mapping's other direction, what
parallel drafting reads, and RoPE, which is computed."""
_EMBEDDING, _HEAD, _FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"
_MAPPING, _MARKS = "d2t", "t2d"


def read_config(directory: PathLike) -> Eagle3Shape:
    """What the checkpoint's config.json says.

    Raises:
        CheckpointError: there is no config.json, or no JSON in it; not an EAGLE-3 drafter, or a
            variant that is not supported.
    """
    return config_json.from_json(*read_json(Path(directory) / CONFIG))


def check_tensors(directory: PathLike, config: Eagle3Shape) -> None:
    """Hold the tensors' names and shapes against `config` without reading the weights.

    Raises:
        CheckpointError: a file is missing or unreadable, tensors are missing, left over or of
            another shape, or the vocabulary mapping is not one.
    """
    _checked(Path(directory), config)


def read_tensors(directory: PathLike, config: Eagle3Shape) -> dict[str, Tensor]:
    """The tensors as they are stored, under the drafter's own names.

    Raises:
        CheckpointError: as `check_tensors`.
    """
    return {name: entry.read() for name, entry in _checked(Path(directory), config).items()}


def load(
    directory: PathLike,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eagle3Model:
    """A drafter with its weights cast to `dtype`, on `device`.

    Without an LM head of its own it wants the target's (`Eagle3Model.wants_head`).

    Raises:
        CheckpointError: as `read_config` and `check_tensors`.
    """
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    make = partial(_model, config, tensors.keys())
    return with_weights(make, rewritten(tensors, config), dtype, device)


def _model(config: Eagle3Shape, names: Collection[str]) -> Eagle3Model:
    """The model that a checkpoint with tensors of these names is for."""
    # The target's embedding will do only where it is as wide, and its LM head where it also names
    # the same tokens.
    narrow = config.hidden_size != config.target_hidden_size
    return Eagle3Model(
        config,
        own_embedding=_EMBEDDING in names or narrow,
        own_head=_HEAD in names or narrow or config.draft_vocab_size != config.vocab_size,
        fc_bias=_FC_BIAS in names,
    )


def _checked(directory: Path, config: Eagle3Shape) -> dict[str, Stored]:
    """The drafter's tensors under its own names; the mapping alone has been read."""
    found = stored_in(directory)
    stored = _named(found, config)
    if _MAPPING not in stored and (mapping := _other_mapping(found, config)) is not None:
        stored[_MAPPING] = Stored(tuple(mapping.shape), lambda: mapping)
    wanted = wanted_shapes(partial(_model, config, stored.keys()))
    shapes = {name: entry.shape for name, entry in stored.items()}
    check_names(shapes, wanted, directory)
    check_shapes(shapes, wanted, directory)
    _check_mapping(stored[_MAPPING].read(), config.vocab_size, directory)
    return stored


def _other_mapping(found: dict[str, Stored], config: Eagle3Shape) -> Tensor | None:
    """d2t of a checkpoint that has none: of its t2d, or with nothing to map; None: neither."""
    if config.draft_vocab_size == config.vocab_size:
        return torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    marks = next((entry for name, entry in found.items() if name.endswith(_MARKS)), None)
    if marks is None:
        return None
    targets = marks.read().nonzero()[:, 0]
    return targets - torch.arange(len(targets))


def _named(stored: dict[str, Stored], config: Eagle3Shape) -> dict[str, Stored]:
    """The same under the drafter's names, unused ones left out and fused ones taken apart."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    fused = {
        ".qkv_proj.": {".q_proj.": heads, ".k_proj.": kv_heads, ".v_proj.": kv_heads},
        ".gate_up_proj.": {
            ".gate_proj.": config.intermediate_size,
            ".up_proj.": config.intermediate_size,
        },
    }
    out = {}
    for name, entry in stored.items():
        if any(part in name for part in _UNUSED):
            continue
        name = name.removeprefix("model.")
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if name.startswith("layers.") and ".hidden_norm." in name:
            continue  # of a feature, which only the first layer reads
        whole = next((key for key in fused if key in name), None)
        if whole is None or entry.shape[:1] != (sum(fused[whole].values()),):
            out[name] = entry
            continue
        first = 0
        for part, rows in fused[whole].items():
            out[name.replace(whole, part)] = entry.rows(first, rows)
            first += rows
    return out


def _check_mapping(d2t: Tensor, vocab_size: int, directory: Path) -> None:
    """d2t [Vd]: draft id + offset must be different target ids."""
    targets = torch.arange(len(d2t)) + d2t
    if d2t.dtype.is_floating_point or not (
        0 <= targets.min() <= targets.max() < vocab_size and len(targets.unique()) == len(targets)
    ):
        raise CheckpointError(
            f"The vocabulary mapping d2t in {directory} is none: draft id + d2t must be different "
            f"target ids below {vocab_size} (d2t holds offsets, not ids)."
        )
