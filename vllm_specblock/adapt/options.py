"""Options of adaptation while serving, and their error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator

from vllm_specblock.adapt.policy.interface import EVERY
from vllm_specblock.drafters.registry import DRAFTERS, drafter_kind
from vllm_specblock.engine.step_observer import ADAPT
from vllm_specblock.options import OptionError, Options, parse_options

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

    from vllm_specblock.engine.config.resolved_config import ResolvedConfig

Requests = Literal["all", "marked"]

_DEVICE = re.compile(r"cuda:\d+")
_TOLD_ELSEWHERE = ("policy", "actions", "lr", "every")
"""With a folder as trainer, these are options of `specblock adapt run`."""


class AdaptConfig(Options):
    """How a SpecBlock drafter learns the texts that it serves (paper, §3.4)."""

    policy: Literal["gain", "paper", "always", "watch"] = "gain"
    """`gain`: update if judged gains outweigh their seconds. `paper`: by the paper's bandit.
    `always`: every `every` requests, as Online Speculative Decoding does. `watch`: only record."""

    trainer: str = "cpu"
    """Where to train: `cpu`, `cuda:N`, or a folder of requests for `specblock adapt run`."""

    actions: Literal["heads", "all"] | None = None
    """The largest update. Default: `heads`; `all` if the trainer has a GPU."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Constant learning rate; three times as much for heads. Default: by the drafter's width."""

    every: Annotated[int, Field(ge=1)] = EVERY
    """Finished requests per update."""

    requests: Requests = "all"
    """Record all requests except those with `specblock_adapt: 0`, or only those with 1."""

    memory: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 512
    """MiB of recorded rows to keep."""

    out: str | None = None
    """Folder for versions. Default: none, or `versions` in the trainer's folder."""

    @field_validator("trainer")
    @classmethod
    def _known(cls, trainer: str) -> str:
        if trainer.startswith("cuda") and not _DEVICE.fullmatch(trainer):
            raise ValueError(
                f"trainer is {trainer!r}, but must have a GPU's number, such as 'cuda:1'"
            )
        if not trainer:
            raise ValueError("trainer is empty, but must be cpu, cuda:N or a folder")
        return trainer

    @model_validator(mode="after")
    def _fits(self) -> AdaptConfig:
        if self.policy == "watch" and self.out is not None:
            raise ValueError("policy 'watch' makes no versions, but out is given: drop one of them")
        defaults = type(self).model_fields
        for key in _TOLD_ELSEWHERE if self.folder is not None else ():
            if getattr(self, key) != defaults[key].default:
                raise ValueError(
                    f"trainer is the folder {self.trainer!r}, whose trainer takes {key!r} from "
                    "specblock adapt run: drop the key"
                )
        return self

    @property
    def folder(self) -> Path | None:
        """Folder for an external trainer; None: the engine starts one."""
        process = self.trainer == "cpu" or _DEVICE.fullmatch(self.trainer)
        return None if process else Path(self.trainer)

    @property
    def trains_beside(self) -> bool:
        """Whether the engine starts a trainer."""
        return self.folder is None and self.policy != "watch"

    @property
    def largest(self) -> str:
        """`heads` or `all`."""
        return self.actions or ("all" if self.trainer.startswith("cuda") else "heads")


def parse_adapt(given: Any, kind: str, where: str = "") -> AdaptConfig | None:
    """Check the value of `adapt` of one drafter; None: it does not adapt.

    Args:
        kind: of the drafter.
        where: put before a key in messages, e.g. "second_drafter.".

    Raises:
        OptionError: a kind of drafter that cannot adapt, or a wrong value.
    """
    name = f"{where}{ADAPT}"
    if not isinstance(given, bool | dict):
        raise OptionError(
            f"speculative_config key '{name}' is {given!r}, but must be true, false or a "
            'dictionary, such as {"policy": "watch"}.'
        )
    if given is False:
        return None
    if not drafter_kind(kind).adapts:
        learners = ", ".join(name for name, each in DRAFTERS.items() if each.adapts)
        raise OptionError(
            f"speculative_config key '{name}' is set for a drafter of kind {kind!r}, but only "
            f"{learners} can adapt: drop the key."
        )
    keys = {} if given is True else {key.replace("-", "_"): each for key, each in given.items()}
    return parse_options(AdaptConfig, keys, f"{name}.", f" under '{name}'")


def check_adapt(
    resolved: ResolvedConfig,
    parallel: ParallelConfig,
    target: ModelConfig,
    gpus: Collection[int],
) -> None:
    """Refuse `adapt` if it cannot run.

    Args:
        resolved: has a drafter that adapts.
        gpus: numbers of the engine's GPUs.
    """
    assert resolved.adapting is not None
    options, key = resolved.adapting.adapt, "speculative_config key 'adapt'"
    assert isinstance(options, AdaptConfig)
    if sum(drafter.adapt is not None for drafter in resolved.drafters) > 1:
        raise OptionError(
            f"{key} is given to both drafters, but only one can adapt: drop it from one."
        )
    _check_trainer(options, gpus)
    if parallel.tensor_parallel_size > 1 and (
        parallel.distributed_executor_backend != "mp" or parallel.nnodes > 1
    ):
        raise OptionError(
            f"{key} is given and tensor_parallel_size is {parallel.tensor_parallel_size}, but "
            "ranks must share one machine (distributed_executor_backend 'mp', nnodes 1): drop "
            "one of them."
        )
    if (options.folder is not None or options.trains_beside) and not os.path.isdir(target.model):
        raise OptionError(
            f"{key} is given, but the trainer reads the target's files, and {target.model!r} is "
            "not a folder: use one, or drop the key."
        )


def _check_trainer(options: AdaptConfig, gpus: Collection[int]) -> None:
    """Refuse a trainer's GPU that serves a rank of several, or does not exist."""
    if not _DEVICE.fullmatch(options.trainer):
        return
    number = int(options.trainer.removeprefix("cuda:"))
    if number in gpus and len(gpus) > 1:  # the other ranks would wait for its steps
        raise OptionError(
            f"speculative_config key 'adapt.trainer' is {options.trainer!r}, but a rank of vLLM "
            "serves on that GPU: name another, or take 'cpu'."
        )
    if number >= torch.cuda.device_count():
        raise OptionError(
            f"speculative_config key 'adapt.trainer' is {options.trainer!r}, but PyTorch finds "
            f"{torch.cuda.device_count()} GPUs here: name one of them, or take 'cpu'."
        )
