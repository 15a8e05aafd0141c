"""Options of an EAGLE-3 drafter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_specblock.drafters.registry import WeightedOptions, register_drafter


@register_drafter(
    "eagle3",
    "vllm_specblock.drafters.eagle3.drafter:Eagle3Drafter",
    "vllm_specblock.drafters.eagle3.checkpoint:FILES",
)
class Eagle3Config(WeightedOptions):
    """How an EAGLE-3 drafter grows its tree: EAGLE-2's, level by level (arXiv 2406.16858).

    The defaults are those of the authors' release, which counts its `depth` of 7 without the
    first level. Trees of fewer than 32 nodes are less deep.
    """

    depth: Annotated[int, Field(ge=1, le=32)] | None = None
    """Drafter forwards per step, and tokens on the longest path. Default: a quarter of the number
    of nodes, from 2 to 8."""

    top_k: Annotated[int, Field(ge=1, le=32)] = 10
    """Nodes of a level that grow children, and children of each. Trees of fewer than
    (depth − 1) × top_k nodes grow fewer per level: each takes a cache slot of the tree."""
