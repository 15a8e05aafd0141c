"""Every option of `specblock bench`, its default and its error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class BenchError(ValueError):
    """A benchmark cannot start or continue; the message is one sentence with the reason."""


class MethodSpec(BaseModel):
    """How a method is served, in addition to the shared arguments.

    None removes a key of `base`. Without `speculative` it is plain vLLM. A string "{NAME}" in
    `speculative` is replaced by the folder that the option `drafter` gives to NAME.

    Attributes:
        base: built-in method that this one extends.
        speculative: vLLM's `speculative_config`; engine: further arguments of its `LLM`.
        env: environment of the engine's process; None: the variable is not set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str | None = None
    speculative: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    env: dict[str, str | None] = {}


class BenchConfig(BaseModel):
    """Options of a benchmark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path = Field(description="Folder or hub id of the target model.")
    set: tuple[str, ...] = Field(
        min_length=1,
        description="Questions, NAME=FILE: a .jsonl of lines with turns or a prompt. Or a folder "
        "of such files. Repeatable.",
    )
    method: tuple[str, ...] = Field(
        default=("plain", "plain-v2", "ngram"),
        min_length=1,
        description="Methods: built-in (adaptive: as served) or those of --define. Repeatable.",
    )
    drafter: dict[str, Path] = Field(
        default={}, description="Drafters, NAME=FOLDER, such as specblock=DIR. Repeatable."
    )
    define: dict[str, MethodSpec] = Field(
        default={},
        description='Methods of your own, such as {"wide": {"base": "specblock", "speculative": '
        '{"num_starts": 16}}}.',
    )
    nodes: int | None = Field(
        default=None, ge=1, le=256, description="N, nodes of every tree. Default: the plugin's."
    )

    temperature: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 1.0), min_length=1, description="0 is greedy. Repeatable."
    )
    max_new_tokens: int = Field(default=128, ge=1, description="Maximum tokens of one answer.")
    ignore_eos: bool = Field(default=False, description="Answers have all --max-new-tokens.")
    questions: int | None = Field(
        default=None, ge=1, description="Questions per set, evenly spread over it. Default: all."
    )
    rounds: int = Field(default=3, ge=1, description="Passes over all questions.")
    batch: int = Field(default=1, ge=1, description="Requests at a time.")
    raw: bool = Field(default=False, description="Continue questions as text, not as a chat.")
    template_options: dict[str, Any] = Field(
        default={}, description="Variables of the chat template, as JSON."
    )
    seed: int = Field(default=0, ge=0, description="Sampling seed, combined with each question's.")

    dtype: str = Field(default="auto", description="Dtype of the target, as in vLLM.")
    max_model_len: int | None = Field(
        default=None, ge=8, description="Maximum tokens of a chat. Default: as many as needed."
    )
    engine: dict[str, Any] = Field(
        default={}, description="Further arguments of vLLM's LLM for all methods, as JSON."
    )
    out: Path = Field(default=Path("runs/bench"), description="Folder of all results.")

    @field_validator("drafter", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """From the command line, as "NAME=FOLDER" each."""
        if not isinstance(given, list):
            return given
        if not all(isinstance(each, str) and "=" in each for each in given):
            raise ValueError("drafter must be NAME=FOLDER, such as specblock=DIR")
        return dict(each.split("=", 1) for each in given)

    def must_match(self) -> dict[str, Any]:
        """Return the options that all results of one folder share.

        The others say how much is run, or `run.prepare` compares what they name.
        """
        free = "target", "set", "method", "drafter", "define", "nodes", "rounds", "out"
        return self.model_dump(mode="json", exclude={*free})
