"""Options of a SpecBlock drafter."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from vllm_specblock.drafters.registry import WeightedOptions, register_drafter

ONE_BLOCK = 16
"""Trees of fewer nodes are drafted in one forward by default."""


@register_drafter(
    "specblock",
    "vllm_specblock.drafters.specblock.drafter:SpecBlockDrafter",
    "vllm_specblock.drafters.specblock.checkpoint",
    adapts=True,
)
class SpecBlockConfig(WeightedOptions):
    """How a SpecBlock drafter grows its tree (paper, §3.2; `K` is fixed by the checkpoint)."""

    num_blocks: Annotated[int, Field(ge=1, le=8)] = 2
    """M: drafter forwards per step. A path has at most M × K draft tokens. In an engine, trees of
    fewer than 16 nodes default to 1."""

    num_starts: Annotated[int, Field(ge=1, le=32)] = 8
    """S: nodes from which the next block grows: the best ones, and the end of the chain."""

    branching: Annotated[
        list[Annotated[int, Field(ge=0, le=32)]], Field(min_length=4, max_length=4)
    ] = [4, 8, 16, 16]  # noqa: RUF012 (pydantic copies it)
    """Children per rank bucket (rank 1, 2–4, 5–10, beyond). 0: no child but the chain's own, and
    no start of a block. The paper uses [2, 4, 6, 4]."""

    read_elsewhere: ClassVar[frozenset[str]] = frozenset({"adapt"})

    @classmethod
    def defaults_for(cls, num_nodes: int) -> dict[str, Any]:
        return {"num_blocks": 1} if num_nodes < ONE_BLOCK else {}
