"""Every option of `specblock data`, its default and its error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class DataOptions(BaseModel):
    """What training shards are made for, from and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path = Field(description="Folder or hub id of the target model.")
    input: tuple[Path, ...] = Field(
        min_length=1,
        description="A .jsonl or .jsonl.gz file: conversations (ShareGPT), messages or data "
        "(UltraChat), a prompt or a text in each line. Repeatable.",
    )
    out: Path = Field(description="Folder to write the shards to.")

    answers: Literal["regenerate", "keep"] = Field(
        default="regenerate", description="regenerate: by the target; keep: those of the data."
    )
    raw_prompts: bool = Field(default=False, description="Do not apply the chat template.")
    temperature: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0,),
        min_length=1,
        description="0 is greedy. Repeatable; conversations take turns.",
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus of sampled answers.")
    max_new_tokens: int = Field(default=1024, ge=1, description="Tokens of one answer, at most.")
    max_length: int = Field(
        default=2048,
        ge=2,
        description="Tokens of a sequence. Chats end there; texts continue in a new sequence.",
    )
    seed: int = Field(default=0, ge=0, description="Seeds the sampling.")
    limit: int | None = Field(
        default=None, ge=1, description="Usable lines of the input to take. Default: all."
    )
    shard_size: int = Field(
        default=512, ge=1, description="Lines of a shard: what a killed run can lose."
    )
    template_options: dict[str, Any] = Field(
        default={},
        description="""Variables of the chat template, such as '{"enable_thinking": false}'.""",
    )
    dtype: str = Field(default="auto", description="Of the target's arithmetic, as in vLLM.")

    draft_vocab_size: int = Field(
        default=32000, ge=1, description="Most frequent tokens whose coverage is printed."
    )
    engine: dict[str, Any] = Field(
        default={},
        description="""Further arguments of vLLM's LLM, such as '{"max_num_seqs": 512}'.""",
    )

    def must_match(self) -> dict[str, Any]:
        """The options that a restarted run shares with the run it continues."""
        free = {"target", "input", "out", "draft_vocab_size", "engine"}
        # A hub id is no path; a folder stays the same one from wherever it is named.
        target = self.target.resolve() if self.target.exists() else self.target
        return {"target": str(target), **self.model_dump(mode="json", exclude=free)}
