"""What gives a drafter the weights that its trainer offers, between two steps."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer.in_engine import EngineTrainer
from vllm_specblock.adapt.trainer.process import TrainerProcess
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.drafters.specblock.refresh import Refresh, RefreshError
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.metrics.exporter import HELP

logger = logging.getLogger("vllm.specblock")


class Link(Protocol):
    """The engine's end of shared memory, or of a folder, as far as versions go."""

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
        self.took(found, time.perf_counter() - began)

    def counts(self) -> Counts:
        """What the trainer did; what was recorded, the recorder counts itself."""
        named = {f"adapt_{name}": count for name, count in self.link.counts.items()}
        return {(name, 0): count for name, count in named.items() if name in HELP}

    def took(self, found: StagedVersion, seconds: float) -> None:
        """A version serves from now on; the swap took so many seconds from serving."""
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


class Arrival:
    """A version on its way to a drafter, over several turns.

    Args:
        versions: told when it serves.
        refresh: of the drafter's weights.

    Attributes:
        version: that is on its way, or is held; None: there is none.
    """

    def __init__(self, versions: Versions, refresh: Refresh) -> None:
        self.versions, self.refresh = versions, refresh
        self.version: StagedVersion | None = None

    def start(self, version: StagedVersion, hold: bool = False) -> None:
        """Begin to make it ready, in place of one that is held; see `Refresh.start`."""
        self.version = version
        self.refresh.start(version.tensors, hold)

    def turn(self) -> None:
        """Between two steps: do what can be done without waiting."""
        version = self.version
        if version is None:
            return
        try:
            seconds = self.refresh.turn()
        except RefreshError:
            self.version = None
            self.versions.link.refuse(version)
            return
        if seconds is not None:
            self.version = None
            self.versions.took(version, seconds)


class DeviceVersions(Versions):
    """Differs in that the drafter serves on a GPU: a version is prepared beside several steps."""

    def __init__(
        self, drafter: SpecBlockDrafter, link: Link, trainer: TrainerProcess | None = None
    ) -> None:
        super().__init__(drafter, link, trainer)
        self._refresh = Refresh(drafter.model)
        self._arrival = Arrival(self, self._refresh)

    def turn(self) -> None:
        if self._arrival.version is not None:
            self._arrival.turn()
        elif (found := self.link.staged()) is not None:
            self._arrival.start(found)
