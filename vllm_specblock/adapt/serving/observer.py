"""Observer of an engine's steps for adaptation, and its trainer."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_specblock.adapt.learning.train_batches import ROWS
from vllm_specblock.adapt.link.folder_link import (
    VERSIONS,
    WAITING,
    FolderLink,
    FolderVersions,
    make_shared_folder,
    shared_folder,
)
from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.adapt.serving.recorder import Recorder
from vllm_specblock.adapt.serving.slabs import Slabs
from vllm_specblock.adapt.serving.swaps import FollowingRank, Swaps
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.common.checkpoint_files import WEIGHTS
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.ranks import Ranks
from vllm_specblock.engine.step_observer import StepObserver

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def make_observer(
    config: VllmConfig,
    resolved: ResolvedConfig,
    drafters: Sequence[Drafter],
    parent: torch.Tensor,
    max_depth: int,
) -> StepObserver | None:
    """Return the observer of an engine; only the first rank records.

    Args:
        parent: [S, N] int32, of the trees under verification.
        max_depth: D, the deepest path.

    Raises:
        TrainError: the folder for requests or that for versions cannot be used.
    """
    adapting = resolved.adapting
    assert adapting is not None
    options, model = adapting.adapt, config.model_config
    assert isinstance(options, AdaptConfig)
    several = config.parallel_config.tensor_parallel_size > 1
    ranks = Ranks() if several else None
    drafter = drafters[resolved.drafters.index(adapting)]
    assert isinstance(drafter, SpecBlockDrafter)
    if ranks is not None and not ranks.first:
        if options.policy == "watch":
            return None  # neither records nor swaps
        return FollowingRank(link_up(model, adapting, options, drafter, ranks)[0])
    low, mid, high = (resolved.layers.index(layer) for layer in adapting.layers)
    # Allocated at load, as in `link_up`, so that vLLM's memory profile counts it.
    slabs = Slabs(len(parent), model.get_hidden_size(), model.dtype, device=parent.device)
    swaps = sink = None
    if options.trains_beside or options.folder is not None:
        swaps, sink = link_up(model, adapting, options, drafter, ranks)
    return Recorder(slabs, (low, mid, high), parent, max_depth + 1, options.requests, sink, swaps)


def link_up(
    model: ModelConfig,
    resolved: ResolvedDrafter,
    options: AdaptConfig,
    drafter: SpecBlockDrafter,
    ranks: Ranks | None = None,
) -> tuple[Swaps, FolderLink | None]:
    """Connect a drafter to its trainer, start the trainer if local, and load the current version.

    Returns the drafter's swaps, and the sink of records (None: another rank records); raises as
    `make_observer`.
    """
    assert resolved.folder is not None
    assert isinstance(resolved.options, SpecBlockConfig)  # only this kind adapts
    paths = Path(resolved.folder), Path(model.model)
    folder, memory, lock = options.folder, round(options.memory * (1 << 20)), None
    first = ranks is None or ranks.first
    if folder is None:
        token = secrets.randbits(62)
        if ranks is not None:
            token = ranks.gather(token)[0]
        folder = shared_folder(token)
        memory = WAITING * ROWS * (4 * model.get_hidden_size() * model.dtype.itemsize + 9)
        versions_in_memory = 0 if options.out else 2 * (paths[0] / WEIGHTS).stat().st_size
        lock = make_shared_folder(token, memory + versions_in_memory) if first else None
    versions = VersionFolder(Path(options.out) if options.out else folder / VERSIONS, *paths)
    sink = FolderLink(folder, versions, memory, lock=lock) if first else None
    link = sink or FolderVersions(versions)
    trainer = None
    if sink is not None and options.folder is None:
        config = trainer_config(options, *paths, resolved.options.num_blocks)
        shares_gpu = options.trainer == str(drafter.model.norm.weight.device)
        trainer = TrainerProcess(replace(config, shares_gpu=shares_gpu), sink)
    atexit.register(link.close if trainer is None else trainer.stop)
    swaps = Swaps(link, drafter.model, ranks, trainer)
    swaps.start()
    if trainer is not None:
        trainer.start()
    return swaps, sink


def trainer_config(
    options: AdaptConfig, drafter: Path, target: Path, num_blocks: int
) -> TrainerConfig:
    """Return the config of a trainer that an engine starts; num_blocks: M that it drafts with."""
    return TrainerConfig(
        str(drafter),
        str(target),
        actions=options.largest,
        num_blocks=num_blocks,
        device=options.trainer,
        **options.model_dump(include={"policy", "lr", "every", "memory", "out"}),
    )
