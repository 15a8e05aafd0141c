"""Whether an engine can adapt: the options against the engine and its target."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from vllm_specblock.adapt.options import DEVICE, AdaptConfig
from vllm_specblock.config import OptionError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

    from vllm_specblock.engine.config.resolved_config import ResolvedConfig


def check_adapt(
    resolved: ResolvedConfig,
    parallel: ParallelConfig,
    target: ModelConfig,
    gpus: Collection[int],
) -> None:
    """Refuse `adapt` where it cannot run.

    Args:
        resolved: with a drafter that adapts.
        gpus: numbers of those that the engine computes on.
    """
    assert resolved.adapting is not None
    options, key = resolved.adapting.adapt, "speculative_config key 'adapt'"
    assert isinstance(options, AdaptConfig)
    if sum(drafter.adapt is not None for drafter in resolved.drafters) > 1:
        raise OptionError(
            f"{key} is given to both drafters, but only one can adapt: drop it from one."
        )
    _check_trainer(options, gpus)
    one_machine = parallel.distributed_executor_backend == "mp" and parallel.nnodes == 1
    if parallel.tensor_parallel_size > 1 and not one_machine:
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
    """Refuse a trainer's GPU that serves among others, or that does not exist."""
    if not DEVICE.fullmatch(options.trainer):
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
