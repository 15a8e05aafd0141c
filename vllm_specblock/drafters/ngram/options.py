"""Options of the n-gram drafter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from vllm_specblock.drafters.registry import DrafterOptions, register_drafter

_CANDIDATES = 2048
"""Nodes that one program sorts, the root included."""


@register_drafter(
    "ngram",
    "vllm_specblock.drafters.ngram.drafter:NGramDrafter",
    reads_text=True,
    needs_block_drop=False,
)
class NGramConfig(DrafterOptions):
    """How the request's own text is looked up."""

    min_match: Annotated[int, Field(ge=1, le=32)] = 1
    """Tokens at the end of the text that must have occurred before."""

    max_match: Annotated[int, Field(ge=1, le=32)] = 8
    """Matches longer than this rank no higher."""

    depth: Annotated[int, Field(ge=1, le=64)] = 16
    """Tokens to copy from an occurrence: the longest path."""

    branches: Annotated[int, Field(ge=1, le=32)] = 8
    """Occurrences to follow: the longest matches first, then the latest. `branches` times `depth`
    must be below 2,048."""

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
