"""Options of the n-gram drafter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from vllm_specblock.drafters.registry import DrafterOptions, register_drafter


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
    """Occurrences to follow: the longest matches first, then the latest."""

    @model_validator(mode="after")
    def _ascending(self) -> NGramConfig:
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match is {self.min_match}, but must not be above max_match, {self.max_match}"
            )
        return self
