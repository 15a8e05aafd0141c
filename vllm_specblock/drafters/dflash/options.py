"""Options of a DFlash drafter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_specblock.drafters.registry import WeightedOptions, register_drafter


@register_drafter(
    "dflash",
    "vllm_specblock.drafters.dflash.drafter:DFlashDrafter",
    "vllm_specblock.drafters.dflash.checkpoint",
    needs_block_drop=False,
)
class DFlashConfig(WeightedOptions):
    """How far a DFlash drafter drafts; its tree is the best paths through one block."""

    depth: Annotated[int, Field(ge=1, le=255)] | None = None
    """Masks of a block, and tokens on the longest path. By default as many as the drafter was
    trained with, and no more than the tree has nodes."""
