"""From a trainer's memory to a folder of versions, and back where another process chose one."""

from __future__ import annotations

import copy
import logging
import time
from pathlib import Path

import torch
from safetensors import SafetensorError

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.link.staged import DELIVERED
from vllm_specblock.adapt.policy.actions import action_between, put
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer import state
from vllm_specblock.adapt.versions import KEPT, VersionFolder, facts_of
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.config import TrainError

logger = logging.getLogger("vllm.specblock")


class VersionWriter:
    """Writes versions, and the trainer's state where a later trainer is to go on from it.

    Args:
        folder: locked.
        drafter: of the versions' config; it is copied.
        adaptation: whose versions.
        seconds: least time between two versions.
        dtype: of the stored weights; None: the delivered drafter's.
        keep: versions to keep.
        with_state: write the state, too.

    Attributes:
        written: the version that the folder says is current; None: unknown.
    """

    def __init__(
        self,
        folder: VersionFolder,
        drafter: SpecBlockModel,
        adaptation: Adaptation,
        seconds: float,
        dtype: torch.dtype | None = None,
        keep: int = KEPT,
        with_state: bool = True,
    ) -> None:
        self.folder, self.adaptation, self.seconds = folder, adaptation, seconds
        self._keep, self._with_state = keep, with_state
        assert folder.drafter is not None
        dtype = dtype or stored_dtype(folder.drafter)
        self._drafter = copy.deepcopy(drafter).to("cpu", dtype)
        self._names: dict[int, str | None] = {0: None}
        self.written: Version | None = adaptation.pool.origin
        self._trunk = DELIVERED
        self._last = time.monotonic() - seconds
        self._known = 0  # stamp of the last choice that was seen, or made here
        self._requests = 0

    def write(self, version: Version, now: bool = False) -> None:
        """Write and choose a version, if it is another than the last, and the state.

        Args:
            now: however short ago the last one was.
        """
        seen = self._with_state and self.adaptation.requests != self._requests
        if not (seen or version is not self.written):
            return
        if not now and time.monotonic() - self._last < self.seconds:
            return
        try:
            if version is not self.written:
                self._publish(version)
            if self._with_state:
                state.save(self.folder.out, self.adaptation, self.folder.fingerprints)
            self._requests = self.adaptation.requests
        except (OSError, SafetensorError) as error:
            logger.warning(
                "SpecBlock adaptation: %s cannot be written to (%s): what is learned is not kept.",
                self.folder.out,
                error,
            )
        self._last = time.monotonic()

    def know(self) -> None:
        """Take what current.json says now as known."""
        self._known = self.folder.stamp()

    def chosen_since(self) -> bool:
        """Whether a person chose after the state was written, which is then out of date."""
        said, path = self.folder.chosen(), self.folder.out / state.FILE
        if said.get("by") != "person" or not path.is_file():
            return False
        return bool(said.get("time_ns", 0) > path.stat().st_mtime_ns)

    def chosen(self) -> Version | None:
        """Return the version in current.json, once, if another process put it there."""
        stamp = self.folder.stamp()
        if stamp == self._known:
            return None
        self._known = stamp
        try:
            name = self.folder.current()
            tensors = None if name is None else self.folder.read(name)
        except TrainError as error:
            if self.folder.stamp() == stamp:  # else another one was chosen: the next call takes it
                logger.warning(
                    "SpecBlock adaptation: the current version in %s cannot be used, and what "
                    "serves stays: %s",
                    self.folder.out,
                    error,
                )
            return None
        if tensors is None:
            self.written, self._trunk = self.adaptation.pool.origin, DELIVERED
            return self.written
        self.adaptation.number += 1
        weights = {name: each.float() for name, each in tensors.items()}
        version = Version(self.adaptation.number, weights, Action.FULL)
        self._names[version.number], self.written, self._trunk = name, version, ""
        return version

    def _publish(self, version: Version) -> None:
        name = self._names.get(version.number, "")
        if name == "" or not (name is None or (self.folder.out / name).is_dir()):
            put(self._drafter, version.tensors)
            gain = self.adaptation.gain_over_origin(version)
            before = {} if self.written is None else self.written.tensors
            same = self._trunk and action_between(before, version.tensors) is Action.HEADS
            facts = {
                "parent": self._parent(version),
                "action": str(version.action),
                "rows": self.adaptation.rows,
                "gain": None if gain != gain else round(gain, 4),
                **({"trunk": self._trunk} if same else {}),
            }
            name = self._names[version.number] = self.folder.write(self._drafter, facts)
        self.folder.use(name)
        self.know()
        self.written = version
        stored = {"checksum": DELIVERED} if name is None else facts_of(self.folder.out / name)
        self._trunk = stored.get("trunk") or stored["checksum"]
        self.folder.prune(self._keep)

    def _parent(self, version: Version) -> str | None:
        """The newest written version that it may stem from."""
        earlier = [number for number in self._names if number < version.number]
        return self._names[max(earlier)] if earlier else None


def stored_dtype(drafter: Path) -> torch.dtype:
    """Of a drafter's weights in its file."""
    with checkpoint.opened(drafter / checkpoint.WEIGHTS) as file:
        return file.get_tensor("lm_head.weight").dtype
