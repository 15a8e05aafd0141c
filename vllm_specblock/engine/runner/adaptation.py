"""What the options of adaptation make of an engine: a recorder, and a trainer beside it."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from vllm.config import VllmConfig

from vllm_specblock.adapt.link.folder_link import VERSIONS, FolderLink
from vllm_specblock.adapt.link.layout import LinkSizes, shapes_of
from vllm_specblock.adapt.link.memory_link import EngineLink
from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.link.stored import stored_version
from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.adapt.slabs import Slabs
from vllm_specblock.adapt.trainer.in_engine import EngineTrainer
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.options import SpecBlockConfig
from vllm_specblock.engine import made_up_requests
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.runner.recording import NullSink, Recorder, Sink, Turning
from vllm_specblock.engine.versions.drafter_versions import DeviceVersions, SlicedVersions, Versions
from vllm_specblock.engine.versions.rank_links import link_to_folder, link_to_process
from vllm_specblock.engine.versions.rank_versions import FollowingRank
from vllm_specblock.engine.versions.ranks import Ranks, tensor_parallel_ranks
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")


def make_recorder(
    config: VllmConfig,
    resolved: ResolvedConfig,
    drafters: Sequence[Drafter],
    parent: torch.Tensor,
    max_depth: int,
) -> Recorder | FollowingRank | None:
    """What records the requests of an engine; None where no drafter adapts.

    Of several ranks the first records.

    Args:
        drafters: of the plan, loaded.
        parent: [S, N] int32, of the trees under verification.
        max_depth: D, the deepest path.

    Raises:
        TrainError: the folder for versions cannot be used.
    """
    adapting = resolved.adapting
    if adapting is None or adapting.adapt is None:
        return None
    made_up_requests.install()
    options, model = adapting.adapt, config.model_config
    several = config.parallel_config.tensor_parallel_size > 1
    ranks = tensor_parallel_ranks() if several else None
    drafter = drafters[resolved.drafters.index(adapting)]
    assert isinstance(drafter, SpecBlockDrafter)
    if ranks is not None and not ranks.first:
        if options.policy == "watch":
            return None  # nothing is recorded here, and no version comes
        return FollowingRank(link_up(config, adapting, options, drafter, ranks)[0])
    low, mid, high = (resolved.layers.index(layer) for layer in adapting.layers)
    # At load, as is what `link_up` makes: vLLM's memory profile counts it.
    slabs = Slabs(len(parent), model.get_hidden_size(), model.dtype, device=parent.device)
    versions: Turning | None = None
    sink: Sink = NullSink()
    if options.trains_beside or options.folder is not None:
        versions, sink = link_up(config, adapting, options, drafter, ranks)
    return Recorder(
        slabs, (low, mid, high), parent, max_depth + 1, options.requests, sink, versions
    )


def link_up(
    config: VllmConfig,
    resolved: ResolvedDrafter,
    options: AdaptConfig,
    drafter: SpecBlockDrafter,
    ranks: Ranks | None = None,
) -> tuple[Turning, Sink]:
    """Link a drafter to its trainer: one that is started beside the engine or inside it, or one
    elsewhere.

    The version that its folder says is to serve does from the first step on, whether a trainer
    comes up or not.

    Args:
        ranks: that draft alike; None: there is one.

    Returns:
        what gives the drafter versions, and what takes what was recorded.

    Raises:
        TrainError: the folder for requests or that for versions cannot be used.
    """
    assert resolved.folder is not None
    source, model = Path(resolved.folder), config.model_config
    on_gpu = drafter.model.norm.weight.is_cuda
    # Who only watches is offered nothing, and needs no room for it.
    watches = options.policy == "watch"
    made = DeviceVersions if on_gpu and not watches else Versions
    target = Path(model.model)
    if options.folder is not None:
        out = Path(options.out) if options.out else options.folder / VERSIONS
        kept = VersionFolder(out, source, target)
        if ranks is not None:
            return link_to_folder(ranks, drafter, options.folder, kept, options.memory)
        folder = FolderLink(options.folder, kept, options.memory)
        atexit.register(folder.close)
        versions = made(drafter, folder)
        versions.take_staged()
        return versions, folder
    assert isinstance(resolved.options, SpecBlockConfig)  # no other kind adapts
    told = trainer_config(options, resolved.folder, model.model, resolved.options.num_blocks)
    if options.trainer == "engine":
        inside = EngineTrainer(replace(told, device=str(drafter.model.norm.weight.device)))
        atexit.register(inside.close)
        versions = made(drafter, inside)
        versions.take_staged()
        return SlicedVersions(versions, inside), inside
    sizes = LinkSizes(
        shapes_of(drafter.model.config), model.get_hidden_size(), model.dtype, model.dtype.itemsize
    )

    def current() -> StagedVersion | None:
        """What is to serve in place of the drafter as delivered."""
        # Who only watches serves that one.
        if not options.out or watches:
            return None
        try:
            found = stored_version(VersionFolder(Path(options.out), source, target))
        except TrainError as error:
            logger.warning("SpecBlock adaptation: %s", error)
            return None
        return found if found is not None and found.number else None

    if ranks is not None and not watches:
        return link_to_process(ranks, drafter, told, sizes, current)
    link = EngineLink(sizes)
    trainer = TrainerProcess(told, link)
    versions = made(drafter, link, trainer)
    if (found := current()) is not None:
        versions.take(found)
    trainer.start()  # it goes on from the number of what serves
    return versions, link


def trainer_config(
    options: AdaptConfig, drafter: str, target: str, num_blocks: int
) -> TrainerConfig:
    """What the options say to a trainer beside the engine.

    Args:
        drafter, target: folders.
        num_blocks: M that the drafter serves with.
    """
    return TrainerConfig(
        drafter=drafter,
        target=target,
        policy=options.rule if options.policy == "bandit" else options.policy,
        actions=options.largest,
        num_blocks=num_blocks,
        lr=options.lr,
        every=options.every,
        memory=options.memory,
        out=options.out,
        device=options.trainer,
    )
