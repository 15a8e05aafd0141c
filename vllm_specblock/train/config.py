"""Options of the trainer and of `specblock data`."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator


class TrainError(ValueError):
    """Training cannot start or continue; the message is one sentence with the reason."""


class RunConfig(BaseModel, extra="forbid", frozen=True):
    """Options of a training run. Defaults are the paper's (Appendix A.1) where it gives one."""

    target: Path = Field(description="Folder or hub id of the frozen target model.")
    data: Path = Field(
        description="What `specblock data` wrote, or a .safetensors with tokens and lengths."
    )
    out: Path = Field(description="Folder for the drafter; training state is in OUT/training.")
    features: Path | None = Field(
        None, description="What `specblock features` wrote; default: run the target on each batch."
    )
    target_name: str | None = Field(None, description="Target to name for vLLM; default: target.")
    layer_ids: tuple[int, int, int] | None = Field(
        None,
        description="Target layers whose states the drafter reads; i is the state after i layers; "
        "default: 2, N/2, N-3 of N.",
    )
    draft_vocab_size: int = Field(32000, ge=10, description="Size of the draft vocabulary.")

    epochs: float = Field(20.0, gt=0, description="Passes over the data.")
    steps: int | None = Field(None, ge=1, description="Number of updates; default: by epochs.")
    batch: int = Field(96, ge=1, description="Windows per update, over all devices.")
    micro_batch: int | None = Field(
        None, ge=1, description="Windows per forward of a device; default: its share of batch."
    )
    length: int = Field(2048, ge=8, description="Tokens per window.")
    pack: bool = Field(True, description="Put several short documents into one window.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for matrices between hidden states, with AdamW for the rest."
    )
    lr: float = Field(5e-5, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    warmup: float = Field(0.015, ge=0, le=1, description="Share of updates with a rising rate.")
    clip: float = Field(0.5, gt=0, description="Largest gradient norm of one update.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seeds weights, shuffling and cuts.")

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    precision: Literal["fp32", "bf16"] = Field(
        "bf16", description="Arithmetic of both models; master weights are always fp32."
    )
    parallel: Literal["replicate", "shard"] = Field(
        "replicate", description="Under torchrun: each device holds the drafter, or a shard of it."
    )
    save_every: int = Field(200, ge=1, description="Updates between two checkpoints.")
    log_every: int = Field(20, ge=1, description="Updates between two log lines.")
    hold_out: int = Field(
        0,
        ge=0,
        description="Sequences, the last of the data, to hold out and measure τ on; the best "
        "drafter is in OUT/best.",
    )
    eval_every: int = Field(1000, ge=1, description="Updates between two measurements of τ.")
    minutes: float | None = Field(None, gt=0, description="Save and stop after this many minutes.")

    @model_validator(mode="after")
    def _micro_batches_fill_the_batch(self) -> RunConfig:
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(
                f"batch {self.batch} must be a multiple of micro_batch {self.micro_batch}"
            )
        return self

    def num_steps(self, windows: int) -> int:
        """Return the number of updates for data of this many windows."""
        return self.steps or math.ceil(self.epochs * windows / self.batch)

    def must_match(self) -> dict[str, Any]:
        """Return the options that a resumed run must share."""
        return self.model_dump(mode="json", exclude=_FREE)


class Recipe(BaseModel, extra="forbid", frozen=True):
    """How a SpecBlock drafter learns."""

    num_blocks: int = Field(2, ge=1, description="M, blocks drafted one after the other.")
    rank_from: int = Field(2000, ge=0, description="First update with the rank loss.")
    loss_floor: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Smallest share of the rows that eq. 6 divides by; 0: as in the paper.",
    )
    valid_prefix: bool = Field(True, description="Ablation: --no-… counts the loss after errors.")
    mask_restart: bool = Field(False, description="Restart the valid-prefix mask in each block.")
    recompute: bool = Field(False, description="Save memory for a third more work.")


class TrainConfig(Recipe, RunConfig):
    """Options of `specblock train`."""

    init: Path | None = Field(None, description="Drafter to start from; default: fresh weights.")
    # Shape of a new drafter; with `init` the checkpoint determines it.
    block_size: int = Field(4, ge=1, description="K, draft positions of one block.")
    num_layers: int = Field(2, ge=1, description="Decoder layers of the drafter.")
    intermediate_size: int | None = Field(None, ge=1, description="MLP width; default: target's.")
    rank_topk: int | Literal["full"] = Field(20, description="Logits for rank features, or full.")
    block_rope: Literal["base", "path"] = Field(
        "base", description="RoPE base of later blocks: block 1's, or moved on by the path."
    )
    prefix_broadcast: bool = Field(
        True, description="Ablation: --no-… gives the prefix to position 1 only."
    )
    layer_shift: bool = Field(True, description="Ablation: --no-… shifts nothing between layers.")

    @model_validator(mode="after")
    def _window_holds_a_block(self) -> TrainConfig:
        if self.length < self.block_size + 2:
            raise ValueError(
                f"length {self.length} is too short for a block of {self.block_size} positions"
            )
        return self


_FREE = {
    "target",
    "target_name",
    "data",
    "out",
    "features",
    "init",
    "micro_batch",
    "device",
    "parallel",
    "recompute",
    "save_every",
    "log_every",
    "minutes",
}
"""Options that may change when a run resumes: locations, and equivalent ways to compute."""


class DataOptions(BaseModel, extra="forbid", frozen=True):
    """Options of `specblock data`."""

    target: Path = Field(description="Folder or hub id of the target model.")
    input: tuple[Path, ...] = Field(
        min_length=1,
        description="A .jsonl or .jsonl.gz file: conversations (ShareGPT), messages or data "
        "(UltraChat), a prompt or a text in each line. Repeatable.",
    )
    out: Path = Field(description="Folder to write the shards to.")

    raw: bool = Field(False, description="Do not apply the chat template.")
    temperature: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0,), min_length=1, description="0 is greedy. Repeatable: lines alternate."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of sampled answers.")
    max_new_tokens: int = Field(1024, ge=1, description="Maximum tokens of an answer.")
    max_length: int = Field(
        2048,
        ge=2,
        description="Maximum tokens of a sequence. Chats end there; texts continue in a new one.",
    )
    seed: int = Field(0, ge=0, description="Seeds the sampling.")
    limit: int | None = Field(None, ge=1, description="Usable lines to take. Default: all.")
    shard_size: int = Field(512, ge=1, description="Lines per shard; a killed run loses one.")
    template_options: dict[str, Any] = Field(
        {},
        description="""Variables of the chat template, such as '{"enable_thinking": false}'.""",
    )
    dtype: str = Field("auto", description="Dtype of the target, as in vLLM.")

    draft_vocab_size: int = Field(32000, ge=1, description="Draft vocabulary to print coverage of.")
    engine: dict[str, Any] = Field(
        {},
        description="""Further arguments of vLLM's LLM, such as '{"max_num_seqs": 512}'.""",
    )

    def must_match(self) -> dict[str, Any]:
        """Return the options that a restarted run must share."""
        free = {"target", "input", "out", "draft_vocab_size", "engine"}
        # Resolve folders, but not hub ids.
        target = self.target.resolve() if self.target.exists() else self.target
        return {"target": str(target), **self.model_dump(mode="json", exclude=free)}


_Model = TypeVar("_Model", bound=BaseModel)


def parse(model: type[_Model], /, **options: Any) -> _Model:
    """Return a `model` of keyword options; raise `TrainError` on the first wrong one."""
    try:
        return model(**options)
    except ValidationError as error:
        errors = error.errors()
        # A misspelt option often leaves another one missing: report the misspelt one.
        first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
        name = ".".join(str(part) for part in first["loc"]) or "options"
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, model.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise TrainError(f"There is no option {name}{hint}") from None
        if first["type"] == "missing":
            raise TrainError(f"The option {name} is missing.") from None
        if first["type"] == "value_error":
            raise TrainError(f"The options do not fit: {first['ctx']['error']}.") from None
        raise TrainError(f"Option {name}: {first['msg']} (got {first['input']!r}).") from None


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file; raises `TrainError` if it is missing, or no mapping."""
    import yaml

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise TrainError(f"There is no recipe {path}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).replace("\n", " ")
        raise TrainError(f"The recipe {path} is not YAML: {reason}.") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise TrainError(f"The recipe {path} must map options to values, such as `lr: 5e-5`.")
    return options
