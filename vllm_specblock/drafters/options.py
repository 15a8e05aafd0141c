"""Options of our drafters, which register their kinds; no drafter is loaded."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from vllm_specblock.drafters.registry import DrafterOptions, WeightedOptions, register_drafter

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
    """Children per rank bucket (rank 1, 2–4, 5–10, beyond). 0: only the chain's own child, and
    no start of a block. The paper uses [2, 4, 6, 4]."""

    @classmethod
    def defaults_for(cls, num_nodes: int) -> dict[str, Any]:
        return {"num_blocks": 1} if num_nodes < ONE_BLOCK else {}


@register_drafter(
    "eagle3",
    "vllm_specblock.drafters.eagle3.drafter:Eagle3Drafter",
    "vllm_specblock.drafters.eagle3.model:FILES",
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


_DRAFTER = "vllm_specblock.drafters.dflash.drafter:DFlashDrafter"
_FILES = "vllm_specblock.drafters.dflash.model:FILES"


@register_drafter(
    "peagle",
    "vllm_specblock.drafters.eagle3.drafter:ParallelDrafter",
    "vllm_specblock.drafters.eagle3.model:FILES",
)
@register_drafter("dspark", _DRAFTER, _FILES, needs_block_drop=False)
@register_drafter("dflash2", _DRAFTER, _FILES, needs_block_drop=False)
@register_drafter("jetspec", _DRAFTER, _FILES, needs_block_drop=False)
@register_drafter("dflash", _DRAFTER, _FILES, needs_block_drop=False)
class DFlashConfig(WeightedOptions):
    """How far such a drafter drafts; its tree is the best paths through one block."""

    depth: Annotated[int, Field(ge=1, le=255)] | None = None
    """Tokens on the longest path. Default: as in training (`peagle`: 8), and at most the number of
    nodes. A smaller depth changes the drafts where masks see later ones (DFlash), else only
    shortens them."""


_CANDIDATES = 2048
"""Nodes that one program sorts, the root included."""


@register_drafter(
    "ngram",
    "vllm_specblock.drafters.ngram.drafter:NGramDrafter",
    reads_text=True,
    needs_block_drop=False,
)
class NGramConfig(DrafterOptions):
    """How texts are looked up."""

    min_match: Annotated[int, Field(ge=1, le=32)] = 1
    """Shortest match: tokens at the end of the text that occur earlier."""

    max_match: Annotated[int, Field(ge=1, le=32)] = 16
    """Matches longer than this rank no higher."""

    depth: Annotated[int, Field(ge=1, le=64)] = 16
    """Tokens to copy from an occurrence: the longest path."""

    branches: Annotated[int, Field(ge=1, le=32)] = 12
    """Occurrences to follow: the longest matches first, then the latest. `branches` times `depth`
    must be below 2,048."""

    earlier_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 1 << 14
    """Tokens of other requests' answers to search as well; 0: only the request's own text. Speed
    can then reveal another request's answer."""

    @model_validator(mode="after")
    def _check(self) -> NGramConfig:
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match is {self.min_match}, but must not be above max_match, {self.max_match}"
            )
        if self.branches * self.depth >= _CANDIDATES:
            raise ValueError(
                f"branches times depth is {self.branches * self.depth}, but must be below "
                f"{_CANDIDATES}"
            )
        return self
