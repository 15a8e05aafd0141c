"""Options of the drafters in this folder; importing it registers them.

The entry point in `research/pyproject.toml` names this module.
"""

from __future__ import annotations

from vllm_specblock.drafters.registry import WeightedOptions, register_drafter

_FILES = "baselines.checkpoint:FILES"


@register_drafter("medusa", "baselines.medusa:MedusaDrafter", _FILES, needs_block_drop=False)
class MedusaConfig(WeightedOptions):
    """Medusa heads draft the best nodes of the product of their distributions."""


@register_drafter("parallelspec", "baselines.parallelspec:ParallelSpecDrafter", _FILES)
class ParallelSpecConfig(WeightedOptions):
    """ParallelSpec drafts as Medusa does, from positions of one forward."""


@register_drafter("falcon", "baselines.falcon:FalconDrafter", _FILES)
class FalconConfig(WeightedOptions):
    """Falcon drafts a tree of fixed shape, which the checkpoint's hit rates give."""
