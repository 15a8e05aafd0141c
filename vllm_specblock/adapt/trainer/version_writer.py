"""Exchange of versions between a trainer and a folder."""

from __future__ import annotations

import copy
import logging
import time

from safetensors import SafetensorError

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.link.staged import DELIVERED
from vllm_specblock.adapt.policy.actions import action_between, put
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.versions import VersionFolder, facts_of, name_of, number_of
from vllm_specblock.drafters.common.checkpoint_files import WEIGHTS, opened
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")


class VersionWriter:
    """Writes the version to serve.

    Args:
        folder: locked.
        seconds: minimum time between two versions.
        keep: number of earlier versions to keep.
    """

    def __init__(
        self,
        folder: VersionFolder,
        drafter: SpecBlockModel,
        adaptation: Adaptation,
        seconds: float,
        keep: int,
    ) -> None:
        self.folder, self.adaptation = folder, adaptation
        self.seconds, self._keep = seconds, keep
        assert folder.drafter is not None
        with opened(folder.drafter / WEIGHTS) as file:
            dtype = file.get_tensor("lm_head.weight").dtype
        self._drafter = copy.deepcopy(drafter).to("cpu", dtype)
        adaptation.number = max(map(number_of, folder.names()), default=0)
        # The current version of the folder; None: unknown.
        self._written: Version | None = adaptation.pool.origin
        self._trunk = DELIVERED
        self._last = float("-inf")
        self._known = 0  # stamp of the last choice, here or elsewhere

    def exchange(self) -> None:
        """Adopt a version that another process chose, and write the one to serve."""
        self._adopt_chosen()
        self.write()

    def write(self, now: bool = False) -> None:
        """Write and select the version to serve, if it changed.

        Args:
            now: ignore the minimum time.
        """
        version, clock = self.adaptation.pool.current, time.monotonic()
        if version is self._written or not (now or clock - self._last >= self.seconds):
            return
        before, self._written, self._last = self._written, version, clock
        try:
            self._publish(version, before)
        except (OSError, SafetensorError, TrainError) as error:
            logger.warning(
                "SpecBlock adaptation: %s cannot be written to (%s): what is learned is not kept.",
                self.folder.out,
                error,
            )

    def _adopt_chosen(self) -> None:
        stamp = self.folder.stamp()
        if stamp == self._known:
            return
        self._known = stamp
        try:
            name = self.folder.current()
            tensors = {} if name is None else self.folder.read(name)
        except TrainError as error:
            if self.folder.stamp() == stamp:  # else another one was chosen: the next call adopts it
                self._written = None
                logger.warning(
                    "SpecBlock adaptation: the current version in %s cannot be used, and what "
                    "serves stays: %s",
                    self.folder.out,
                    error,
                )
            return
        if name is None:
            version, self._trunk = self.adaptation.pool.origin, DELIVERED
        else:
            weights = {name: each.float() for name, each in tensors.items()}
            version, self._trunk = Version(number_of(name), weights, Action.FULL), ""
        self._written = version
        self.adaptation.adopt(version)

    def _publish(self, version: Version, before: Version | None) -> None:
        name = name_of(version.number)
        if name is not None and name not in self.folder.names():
            put(self._drafter, version.tensors)
            gain = self.adaptation.gain_over_origin(version)
            held = {} if before is None else before.tensors
            same = self._trunk and action_between(held, version.tensors) is Action.HEADS
            facts = {
                "parent": name_of(version.parent or 0),
                "action": str(version.action),
                "rows": self.adaptation.rows,
                "gain": None if gain != gain else round(gain, 4),
                **({"trunk": self._trunk} if same else {}),
            }
            self.folder.write(self._drafter, facts, version.number)
        self.folder.use(name)
        self._known = self.folder.stamp()
        stored = {"checksum": DELIVERED} if name is None else facts_of(self.folder.out / name)
        self._trunk = stored.get("trunk") or stored["checksum"]
        self.folder.prune(self._keep)
