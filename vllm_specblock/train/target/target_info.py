"""Facts of a target, from its config.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_specblock.drafters.common.config import CheckpointError, default_layer_ids, read_json
from vllm_specblock.drafters.specblock.config import TargetInfo


def read_target(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the config.json of a target; raises `CheckpointError` if there is none, or a size is
    missing."""
    raw, where = read_json(Path(directory) / "config.json")
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"):
        value = raw.get(key)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{where} has {key} = {value!r}, but it must be a whole number.")
    return raw


def describe_target(
    directory: str | os.PathLike[str],
    name: str | None = None,
    layer_ids: tuple[int, int, int] | None = None,
) -> TargetInfo:
    """Describe the target in `directory`, called `name` (default: `directory` as given). Raises
    `CheckpointError` without a target there, or if `layer_ids` (default: `default_layer_ids`) are
    not three ascending layers of it."""
    raw = read_target(directory)
    layers = raw["num_hidden_layers"]
    layer_ids = layer_ids or default_layer_ids(layers)
    low, mid, high = layer_ids
    if not 0 <= low < mid < high < layers:
        raise CheckpointError(
            f"Feature layers {list(layer_ids)} were given, but they must be three distinct ones "
            f"in ascending order, from 0 to {layers - 1} for the target in {directory}."
        )
    return TargetInfo(
        name=str(directory) if name is None else name,
        architectures=tuple(raw.get("architectures") or ()),
        hidden_size=raw["hidden_size"],
        vocab_size=raw["vocab_size"],
        layer_ids=layer_ids,
    )


def check_target(
    drafter: str | os.PathLike[str],
    made_for: TargetInfo,
    directory: str | os.PathLike[str],
    found: TargetInfo,
) -> None:
    """Raise `CheckpointError` if a drafter was made for a target of other sizes than that in
    `directory`."""
    for what in ("hidden_size", "vocab_size"):
        wanted, here = getattr(made_for, what), getattr(found, what)
        if wanted != here:
            raise CheckpointError(
                f"The drafter in {drafter} is for a target whose {what} is {wanted}, but that of "
                f"{directory} is {here}."
            )
