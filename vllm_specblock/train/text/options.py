"""Every option of `specblock data`, its default and its error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class DataOptions(BaseModel):
    """What training shards are made for, from and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path = Field(description="Folder of the target model.")
    input: tuple[Path, ...] = Field(min_length=1, description="JSON-lines files.")
    out: Path = Field(description="Folder of the shards.")

    answers: Literal["regenerate", "keep"] = Field(
        default="regenerate", description="Who writes the answers: the target, or the data."
    )
    raw_prompts: bool = Field(default=False, description="Prompts bypass the chat template.")
    temperature: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0,), min_length=1, description="0 is greedy; several take turns."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus of sampled answers.")
    max_new_tokens: int = Field(default=1024, ge=1, description="Of one answer.")
    max_length: int = Field(default=2048, ge=2, description="Tokens of a sequence at most.")
    seed: int = Field(default=0, ge=0, description="Seeds the sampling.")
    limit: int | None = Field(default=None, ge=1, description="Usable lines to take.")
    shard_size: int = Field(default=512, ge=1, description="Lines of a shard.")
    template_options: dict[str, Any] = Field(
        default={}, description="Further variables of the chat template."
    )
    dtype: str = Field(default="auto", description="Of the target's arithmetic, as in vLLM.")

    draft_vocab_size: int = Field(
        default=32000, ge=1, description="Tokens whose coverage is printed."
    )
    engine: dict[str, Any] = Field(default={}, description="Further arguments of vLLM's `LLM`.")

    def must_match(self) -> dict[str, Any]:
        """The options that a restarted run shares with the run it continues."""
        free = {"target", "input", "out", "draft_vocab_size", "engine"}
        # A hub id is no path; a folder stays the same one from wherever it is named.
        target = self.target.resolve() if self.target.exists() else self.target
        return {"target": str(target), **self.model_dump(mode="json", exclude=free)}
