"""Options of a JetSpec drafter."""

from __future__ import annotations

from vllm_specblock.drafters.dflash.options import DFlashConfig
from vllm_specblock.drafters.registry import register_drafter


@register_drafter(
    "jetspec",
    "vllm_specblock.drafters.jetspec.drafter:JetSpecDrafter",
    "vllm_specblock.drafters.jetspec.checkpoint",
    needs_block_drop=False,
)
class JetSpecConfig(DFlashConfig):
    """How far a JetSpec drafter drafts; DFlash's options.

    No mask sees a later one, so a smaller `depth` leaves out masks and changes nothing before them.
    """
