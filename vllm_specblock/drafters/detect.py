"""Which kind of drafter a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specblock.drafters.common.checkpoint_files import CONFIG
from vllm_specblock.drafters.common.config import CheckpointError, read_json
from vllm_specblock.drafters.dflash import config as dflash
from vllm_specblock.drafters.eagle3 import config as eagle3
from vllm_specblock.drafters.registry import DRAFTERS, drafter_kind

KIND = "specblock_head"
"""The key of config.json that names the kind, where its layout does not tell."""


def kind_of(directory: Path) -> str:
    """Return the kind of a checkpoint by its config.json; CheckpointError: none, or unknown."""
    raw, where = read_json(directory / CONFIG)
    named = raw.get(KIND)
    if block := dflash.kind_in(raw):
        return block
    if named is None:
        return eagle3.kind_in(raw) or "specblock"
    known = [name for name, kind in DRAFTERS.items() if kind.checkpoint is not None]
    if named not in known:
        raise CheckpointError(
            f"{where} has {KIND} = {named!r}, but it must be one of {', '.join(known)}. Drafters "
            "of other packages are known once the package is installed."
        )
    return str(named)


def reader_of(directory: Path) -> Any:
    """Return the reader of a checkpoint, of its kind; raises as `kind_of`."""
    return drafter_kind(kind_of(directory)).load_checkpoint_module()


def check_configs(speculative_config: Mapping[str, Any]) -> None:
    """Read the configs of local drafters; raises CheckpointError if one is wrong."""
    for drafter in (speculative_config, speculative_config.get("second_drafter") or {}):
        folder = Path(drafter.get("model") or "")
        if drafter.get("model") and folder.is_dir():
            reader_of(folder).read_config(folder)
