"""From a trainer's memory to the folder of versions, and back where a person chose one."""

from __future__ import annotations

import copy
import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy.actions import put
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer import state
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.model import SpecBlockModel

logger = logging.getLogger("vllm.specblock")


class VersionWriter:
    """Writes versions and the trainer's state, now and then.

    Args:
        folder: locked.
        drafter: of the versions' config; it is copied.
        adaptation: whose versions.
        seconds: between two writings at least.
    """

    def __init__(
        self,
        folder: VersionFolder,
        drafter: SpecBlockModel,
        adaptation: Adaptation,
        seconds: float,
    ) -> None:
        self.folder, self.adaptation, self.seconds = folder, adaptation, seconds
        assert folder.drafter is not None
        self._dtype = stored_dtype(folder.drafter)
        self._drafter = copy.deepcopy(drafter).to("cpu", self._dtype)
        self._names: dict[int, str | None] = {0: None}
        self._written = adaptation.pool.origin
        self._last = time.monotonic() - seconds
        self._known = 0  # stamp of the last choice that was seen, or made here
        self._requests = 0

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of drafter and target."""
        return self.folder.fingerprints

    def write(self, version: Version, now: bool = False) -> None:
        """Write a version, if it is another than the last, and the state.

        Args:
            now: however short ago the last one was.
        """
        # A policy draws and counts at requests that nothing is learned from, too.
        seen = self.adaptation.requests != self._requests
        if not (seen or version is not self._written):
            return
        if not now and time.monotonic() - self._last < self.seconds:
            return
        try:
            if version is not self._written:
                self._publish(version)
            state.save(self.folder.out, self.adaptation, self.fingerprints)
            self._requests = self.adaptation.requests
        except OSError as error:
            logger.warning(
                "SpecBlock adaptation: %s cannot be written to (%s): what is learned is not kept.",
                self.folder.out,
                error.strerror,
            )
        self._last = time.monotonic()

    def know(self) -> None:
        """What current.json says now is no news."""
        self._known = self.folder.stamp()

    def chosen_since(self) -> bool:
        """A person chose after the state was written: what was learned till then is to be left."""
        said, path = self.folder.chosen(), self.folder.out / state.FILE
        if said.get("by") != "person" or not path.is_file():
            return False
        return bool(said.get("time_ns", 0) > path.stat().st_mtime_ns)

    def chosen(self) -> Version | None:
        """The version in current.json, where somebody else put it there; one that cannot be used is
        told of, once."""
        stamp = self.folder.stamp()
        if stamp == self._known:
            return None
        self._known = stamp
        path, sentence = self.folder.current()
        if sentence is not None:
            logger.warning("SpecBlock adaptation: %s", sentence)
            return None
        if path is None:
            self._written = self.adaptation.pool.origin
            return self._written
        self.adaptation.number += 1
        version = Version(self.adaptation.number, _tensors(path), Action.FULL)
        self._names[version.number], self._written = path.name, version
        return version

    def _publish(self, version: Version) -> None:
        name = self._names.get(version.number, "")
        if name is not None and not (name and (self.folder.out / name).is_dir()):
            put(self._drafter, version.tensors)
            gain = self.adaptation.gain_over_origin(version)
            facts = {
                "parent": self._parent(version),
                "action": str(version.action),
                "rows": self.adaptation.rows,
                "gain": None if gain != gain else round(gain, 4),
            }
            self._names[version.number] = self.folder.write(self._drafter, facts)
        self.folder.use(self._names[version.number])
        self.know()
        self._written = version
        self.folder.prune()

    def _parent(self, version: Version) -> str | None:
        """The newest written version that it may stem from; None: the drafter as delivered."""
        earlier = [number for number in self._names if number < version.number]
        return self._names[max(earlier)] if earlier else None


def stored_dtype(drafter: Path) -> torch.dtype:
    """Of a drafter's weights in its file."""
    with checkpoint.opened(drafter / checkpoint.WEIGHTS) as file:
        return file.get_tensor("lm_head.weight").dtype


def _tensors(folder: Path) -> dict[str, Tensor]:
    drafter = checkpoint.load(folder, torch.float32)
    return {name: value.detach() for name, value in drafter.named_parameters()}
