"""What the options of adaptation make of an engine: a recorder, and a trainer beside it."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from vllm.config import VllmConfig

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.link.folder_link import VERSIONS, FolderLink
from vllm_specblock.adapt.link.layout import LinkSizes, shapes_of
from vllm_specblock.adapt.link.memory_link import EngineLink
from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.link.stored import stored_version
from vllm_specblock.adapt.options import AdaptConfig
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.adapt.slabs import Slabs
from vllm_specblock.adapt.trainer.in_engine import EngineTrainer
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.drafters.specblock.device_refresh import DeviceRefresh
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.options import SpecBlockConfig
from vllm_specblock.drafters.specblock.refresh import RefreshError
from vllm_specblock.engine import draft_updates, made_up_requests
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, ResolvedDrafter
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.metrics.exporter import HELP
from vllm_specblock.engine.runner.recording import Nobody, Recorder
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")


class Link(Protocol):
    """The engine's end of shared memory, or of a folder."""

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool: ...

    def staged(self) -> StagedVersion | None: ...

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None: ...

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None: ...

    @property
    def counts(self) -> dict[str, int]: ...


class Versions:
    """Gives a drafter the weights that its trainer offers.

    Args:
        drafter: that adapts.
        link: to the trainer.
        trainer: started, of what ends with the engine; None: it is elsewhere.
    """

    def __init__(
        self, drafter: SpecBlockDrafter, link: Link, trainer: TrainerProcess | None = None
    ) -> None:
        self.drafter, self.link, self.trainer = drafter, link, trainer

    def turn(self) -> None:
        """Between two steps: take a version if one waits, in one call."""
        self.take_staged()

    def take_staged(self) -> None:
        """Take a version if one waits; on a GPU that waits for it, so not between steps."""
        found = self.link.staged()
        if found is not None:
            self.take(found)

    def take(self, found: StagedVersion) -> None:
        """Let a version serve, unless it holds what is not finite in the dtype that serves."""
        began = time.perf_counter()
        try:
            self.drafter.refresh(found.tensors)
        except RefreshError:
            self.link.refuse(found)
            return
        self._took(found, time.perf_counter() - began)

    def counts(self) -> Counts:
        """What the trainer did; what was recorded, the recorder counts itself."""
        named = {f"adapt_{name}": count for name, count in self.link.counts.items()}
        return {(name, 0): count for name, count in named.items() if name in HELP}

    def _took(self, found: StagedVersion, seconds: float) -> None:
        self.link.took(found, seconds)
        logger.info(
            "SpecBlock adaptation: version %d (%s, from %d) swapped in in %.1f ms.",
            found.number,
            "heads" if found.action is Action.HEADS else "all",
            found.parent,
            1e3 * seconds,
        )


class SlicedVersions:
    """Versions of a trainer inside the engine, which works where these are looked for."""

    def __init__(self, versions: Versions, trainer: EngineTrainer) -> None:
        self.versions, self.trainer, self.link = versions, trainer, versions.link

    def turn(self) -> None:
        self.versions.turn()
        self.trainer.slice()

    def counts(self) -> Counts:
        return self.versions.counts()


class DeviceVersions(Versions):
    """Differs in that the drafter serves on a GPU: a version arrives over several steps, none of
    which waits for it, and the seconds that a swap took are the device's."""

    def __init__(
        self, drafter: SpecBlockDrafter, link: Link, trainer: TrainerProcess | None = None
    ) -> None:
        super().__init__(drafter, link, trainer)
        self._refresh = DeviceRefresh(drafter.model)
        self._coming: StagedVersion | None = None

    def turn(self) -> None:
        coming = self._coming
        if coming is None:
            self._coming = coming = self.link.staged()
            if coming is not None:
                self._refresh.start(coming.tensors)
            return
        try:
            seconds = self._refresh.turn()
        except RefreshError:
            self._coming = None
            self.link.refuse(coming)
            return
        if seconds is not None:
            self._coming = None
            self._took(coming, seconds)


def make_recorder(
    config: VllmConfig,
    resolved: ResolvedConfig,
    drafters: Sequence[Drafter],
    parent: torch.Tensor,
    max_depth: int,
) -> Recorder | None:
    """What records the requests of an engine; None where no drafter adapts.

    Args:
        drafters: of the plan, loaded.
        parent: [S, N] int32, of the trees under verification.
        max_depth: D, the deepest path.

    Raises:
        TrainError: the folder for versions cannot be used.
    """
    draft_updates.install()
    adapting = resolved.adapting
    if adapting is None or adapting.adapt is None:
        return None
    made_up_requests.install()
    options, model = adapting.adapt, config.model_config
    low, mid, high = (resolved.layers.index(layer) for layer in adapting.layers)
    # At load, as is what `link_up` makes: vLLM's memory profile counts it.
    slabs = Slabs(len(parent), model.get_hidden_size(), model.dtype, device=parent.device)
    versions = None
    if options.trains_beside or options.folder is not None:
        drafter = drafters[resolved.drafters.index(adapting)]
        assert isinstance(drafter, SpecBlockDrafter)
        versions = link_up(config, adapting, options, drafter)
    return Recorder(
        slabs,
        (low, mid, high),
        parent,
        max_depth + 1,
        options.requests,
        Nobody() if versions is None else versions.link,
        versions,
    )


def link_up(
    config: VllmConfig, resolved: ResolvedDrafter, options: AdaptConfig, drafter: SpecBlockDrafter
) -> Versions | SlicedVersions:
    """Link a drafter to its trainer: one that is started beside the engine or inside it, or one
    elsewhere.

    The version that its folder says is to serve does from the first step on, whether a trainer
    comes up or not.

    Raises:
        TrainError: the folder for requests or that for versions cannot be used.
    """
    assert resolved.folder is not None
    source, model = Path(resolved.folder), config.model_config
    on_gpu = drafter.model.norm.weight.is_cuda
    # Who only watches is offered nothing, and needs no room for it.
    made = DeviceVersions if on_gpu and options.policy != "watch" else Versions
    target = Path(model.model)
    if options.folder is not None:
        out = Path(options.out) if options.out else options.folder / VERSIONS
        folder = FolderLink(options.folder, VersionFolder(out, source, target), options.memory)
        atexit.register(folder.close)
        versions = made(drafter, folder)
        versions.take_staged()
        return versions
    assert isinstance(resolved.options, SpecBlockConfig)  # no other kind adapts
    told = trainer_config(options, resolved.folder, model.model, resolved.options.num_blocks)
    if options.trainer == "engine":
        inside = EngineTrainer(replace(told, device=str(drafter.model.norm.weight.device)))
        atexit.register(inside.close)
        versions = made(drafter, inside)
        versions.take_staged()
        return SlicedVersions(versions, inside)
    sizes = LinkSizes(
        shapes_of(drafter.model.config), model.get_hidden_size(), model.dtype, model.dtype.itemsize
    )
    link = EngineLink(sizes)
    trainer = TrainerProcess(told, link)
    versions = made(drafter, link, trainer)
    # Who only watches serves the drafter as delivered.
    if options.out and options.policy != "watch":
        try:
            found = stored_version(VersionFolder(Path(options.out), source, target))
        except TrainError as error:
            logger.warning("SpecBlock adaptation: %s", error)
        else:
            if found is not None and found.number:
                versions.take(found)
    trainer.start()  # it goes on from the number of what serves
    return versions


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
        **({} if options.lr is None else {"lr": options.lr}),  # type: ignore[arg-type]  # of all
        every=options.every,
        memory=options.memory,
        out=options.out,
        device=options.trainer,
    )
