"""Links of several ranks to one trainer: the first rank's, and those that read beside it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path

from vllm_specblock.adapt.link.folder_link import FolderLink
from vllm_specblock.adapt.link.folder_versions import RankFolder
from vllm_specblock.adapt.link.layout import LinkSizes
from vllm_specblock.adapt.link.memory_link import EngineLink
from vllm_specblock.adapt.link.shared_versions import RankLink
from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.refresh import Refresh
from vllm_specblock.engine.runner.recording import NullSink, Sink
from vllm_specblock.engine.versions.drafter_versions import Link, Versions
from vllm_specblock.engine.versions.rank_versions import RankVersions
from vllm_specblock.engine.versions.ranks import Ranks


def link_to_process(
    ranks: Ranks,
    drafter: SpecBlockDrafter,
    told: TrainerConfig,
    sizes: LinkSizes,
    current: Callable[[], StagedVersion | None],
) -> tuple[RankVersions, Sink]:
    """The first rank makes the memory and starts the trainer; the others read that memory.

    They open it by the first one's process id, so it has no name, and goes with the last of them.

    Args:
        current: what a folder says is to serve from the first step on.

    Returns:
        see `adaptation.link_up`.

    Raises:
        TrainError: another rank's process cannot open the memory; or as `TrainerProcess.start`.
    """
    if not ranks.first:
        process, descriptor = ranks.from_first([0, 0])
        versions = _versions(ranks, drafter, RankLink(process, descriptor, sizes.shapes))
        versions.start(current)
        return versions, NullSink()
    link = EngineLink(sizes)
    ranks.from_first([os.getpid(), link.descriptor])
    trainer = TrainerProcess(told, link)
    versions = _versions(ranks, drafter, link, trainer)
    versions.start(current)
    trainer.start()  # it goes on from the number of what serves
    return versions, link


def link_to_folder(
    ranks: Ranks, drafter: SpecBlockDrafter, folder: Path, kept: VersionFolder, memory: float
) -> tuple[RankVersions, Sink]:
    """The first rank locks the folder and writes requests; all of them look for versions.

    Args:
        folder: for requests.
        kept: where versions are.
        memory: MiB of requests that may lie in the folder.

    Returns:
        see `adaptation.link_up`.

    Raises:
        TrainError: as `FolderLink`.
    """
    link = FolderLink(folder, kept, memory) if ranks.first else RankFolder(kept)
    atexit.register(link.close)
    versions = _versions(ranks, drafter, link)
    versions.start(link.current)
    return versions, link if isinstance(link, FolderLink) else NullSink()


def _versions(
    ranks: Ranks, drafter: SpecBlockDrafter, link: Link, trainer: TrainerProcess | None = None
) -> RankVersions:
    return RankVersions(Versions(drafter, link, trainer), ranks, Refresh(drafter.model))
