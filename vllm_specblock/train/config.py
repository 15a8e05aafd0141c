"""Every option of the trainer, its default and its error."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class TrainError(ValueError):
    """Training cannot start or go on; the message is one sentence that says why."""


class TrainConfig(BaseModel):
    """Options of one training run. Defaults are the paper's (Appendix A.1) where it gives one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path = Field(description="Folder of the frozen target model.")
    data: Path = Field(
        description="A folder of text files, a .jsonl file, or a .safetensors file of tokens."
    )
    out: Path = Field(description="Where the drafter goes; training state lies in out/training.")
    init: Path | None = Field(
        default=None, description="Drafter to start from (default: fresh weights for the target)."
    )

    # What a fresh drafter is like; with `init` the checkpoint says all of this.
    target_name: str | None = Field(
        default=None, description="What vLLM loads as the target (default: `target` as given)."
    )
    layer_ids: tuple[int, int, int] | None = Field(
        default=None, description="Target layers of the context feature (default: 2, N/2, N-3)."
    )
    block_size: int = Field(default=4, ge=1, description="K, draft positions of one block.")
    num_layers: int = Field(default=2, ge=1, description="Decoder layers of the drafter.")
    draft_vocab_size: int = Field(
        default=32000, ge=1, description="Most frequent target tokens that the drafter can name."
    )

    steps: int = Field(default=10000, ge=1, description="Optimiser updates in all.")
    batch: int = Field(default=8, ge=1, description="Sequences of one update.")
    length: int = Field(default=512, ge=8, description="Longest sequence, tokens.")
    lr: float = Field(default=5e-5, gt=0, description="Peak learning rate of AdamW.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    warmup: float = Field(
        default=0.015, ge=0, le=1, description="Share of the steps with a linearly rising rate."
    )
    clip: float = Field(default=0.5, gt=0, description="Largest gradient norm of one update.")
    num_blocks: int = Field(default=2, ge=1, description="M, blocks drafted one after the other.")
    rank_from: int = Field(default=2000, ge=0, description="First update with the rank loss.")
    loss_floor: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Share of the rows that eq. 6 divides by at the least; 0 is the paper's.",
    )
    mask_restart: bool = Field(
        default=False, description="Ablation: the valid-prefix mask starts anew in each block."
    )
    seed: int = Field(default=0, ge=0, description="Seeds weights, shuffling and cuts.")

    device: str = Field(default="cpu", description="cpu, cuda or cuda:N.")
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Arithmetic of both models; master weights are always fp32."
    )
    compiled: bool = Field(default=False, description="Run the drafter through torch.compile.")
    save_every: int = Field(default=200, ge=1, description="Updates between two checkpoints.")
    log_every: int = Field(default=20, ge=1, description="Updates between two log lines.")

    @model_validator(mode="after")
    def _window_holds_a_block(self) -> TrainConfig:
        if self.length < self.block_size + 2:
            raise ValueError(
                f"length {self.length} holds no whole block of {self.block_size} positions"
            )
        return self

    def must_match(self) -> dict:
        """The options that a resumed run shares with the run it continues."""
        free = {
            "target",
            "target_name",
            "data",
            "out",
            "init",
            "device",
            "compiled",
            "save_every",
            "log_every",
        }
        return self.model_dump(mode="json", exclude=free)


def parse(**options) -> TrainConfig:
    """A `TrainConfig` from keyword options, or a `TrainError` naming the first wrong one."""
    try:
        return TrainConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "options"
        raise TrainError(f"Option {name}: {first['msg']} (got {first['input']!r}).") from None
