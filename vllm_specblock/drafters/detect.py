"""Which kind of drafter a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

from vllm_specblock.drafters.baselines.checkpoint import KIND
from vllm_specblock.drafters.dflash.config import is_causal, is_dflash
from vllm_specblock.drafters.eagle3.config_json import is_eagle3
from vllm_specblock.drafters.registry import DRAFTERS
from vllm_specblock.drafters.specblock.checkpoint import CONFIG
from vllm_specblock.drafters.specblock.config import CheckpointError
from vllm_specblock.drafters.specblock.config_json import read_json


def kind_of(directory: Path) -> str:
    """What the checkpoint in `directory` is, by its config.json alone.

    That names a kind under `specblock_head`, or is in the layout of EAGLE-3's, DFlash's, JetSpec's
    or SpecBlock's authors, whose drafters do not say what they are.

    Raises:
        CheckpointError: there is no config.json, no JSON in it, or a kind that is not known.
    """
    raw, where = read_json(directory / CONFIG)
    named = raw.get(KIND)
    if named is None and is_dflash(raw):
        return "jetspec" if is_causal(raw) else "dflash"
    if named is None:
        return "eagle3" if is_eagle3(raw) else "specblock"
    known = [name for name, kind in DRAFTERS.items() if kind.checkpoint is not None]
    if named not in known:
        raise CheckpointError(
            f"{where} has {KIND} = {named!r}, but it must be one of {', '.join(known)}."
        )
    return str(named)
