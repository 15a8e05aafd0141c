"""Options of DFlash and JetSpec drafters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_specblock.drafters.registry import WeightedOptions, register_drafter

_DRAFTER = "vllm_specblock.drafters.dflash.drafter:DFlashDrafter"
_FILES = "vllm_specblock.drafters.dflash.model:FILES"


@register_drafter("jetspec", _DRAFTER, _FILES, needs_block_drop=False)
@register_drafter("dflash", _DRAFTER, _FILES, needs_block_drop=False)
class DFlashConfig(WeightedOptions):
    """How far such a drafter drafts; its tree is the best paths through one block."""

    depth: Annotated[int, Field(ge=1, le=255)] | None = None
    """Masks of a block, and tokens on the longest path. Default: as in training, and at most the
    number of nodes. A smaller depth changes DFlash's drafts, and only shortens JetSpec's."""
