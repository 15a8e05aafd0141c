"""Versions as folders: whole drafters with their origin, one of them current.

    out/                      mode 0700: weights are as private as their training text
      .lock                   held by the writer
      current.json            the serving version, or none; replaced last
      version-00007/          a drafter's folder (`drafters/specblock/checkpoint.py`), and
        provenance.json       its parent, action, rows and gain, checksum and fingerprints

They never hold text or tokens.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_specblock.adapt.files import lock_folder, private_folder, read_json, write_json
from vllm_specblock.adapt.policy.actions import trains
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    MAPPING_NAMES,
    WEIGHTS,
    opened,
)
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train import provenance, saving
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.target import target_rows

CURRENT, PREFIX = "current.json", "version-"
DELIVERED = "delivered"
"""Trunk of the delivered drafter, and of versions that differ only in their heads."""
_origin = cache(provenance.provenance)
KEPT = 8
"""Versions kept beside the current one: 1.4 GB each for an 8B target's drafter."""


@dataclass(frozen=True, eq=False)
class StagedVersion:
    """A version that a serving drafter can load.

    Attributes:
        number: 0 for the drafter as delivered; parent: where its training started.
        action: HEADS: `tensors` are the LM head and the rank head, and the drafter serves the trunk
            already. FULL: all parameters.
        tensors: by the checkpoint's names, on the CPU.
        key: identifies the weights in all processes; never 0.
        trunk: equal for versions that differ only in their heads.
    """

    number: int
    parent: int
    action: Action
    tensors: Mapping[str, Tensor] = field(repr=False)
    key: int = 1
    trunk: str = DELIVERED


class VersionFolder:
    """Versions of one drafter for one target; raises TrainError if these cannot be read.

    Args:
        out: the folder, which may not exist yet.
        drafter, target: their folders; None: accept any version.
    """

    def __init__(self, out: Path, drafter: Path | None = None, target: Path | None = None) -> None:
        self.out, self.drafter = out, drafter
        self.fingerprints: dict[str, str] = {}
        if drafter is not None:
            self.fingerprints["drafter"] = fingerprint(drafter)
        if target is not None:
            self.fingerprints["target"] = target_rows.fingerprint(target)
        self._lock: int | None = None

    def lock(self) -> None:
        """Become the writer, and remove incomplete versions; raises TrainError if there is another
        writer, or the folder cannot be created."""
        if self._lock is None:
            private_folder(self.out)
            self._lock = lock_folder(self.out)
            for left in self.out.glob(f".{PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(
        self, drafter: SpecBlockModel, facts: dict[str, Any], number: int | None = None
    ) -> str:
        """Write a version atomically and return its name.

        Args:
            drafter: stored in its dtype.
            facts: `parent` (a version's name, or None), `action`, `rows`, `gain`; maybe `trunk`.
            number: None: the next.
        """
        name = name_of(number or max(map(number_of, self.names()), default=0) + 1)
        assert name is not None
        aside = self.out / f".{name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        saving.save(drafter, aside)
        facts = {
            **facts,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "checksum": _digest(aside / WEIGHTS),
            "fingerprints": self.fingerprints,
        }
        provenance.write(aside, {"adaptation": facts, **_origin()})
        for path in aside.iterdir():
            path.chmod(0o600)
        aside.rename(self.out / name)
        return name

    def use(self, name: str | None) -> None:
        """Make a version current; None: the delivered drafter. Raises TrainError as `read`."""
        if name is not None:
            self.read(name)
        write_json(self.out / CURRENT, {"version": name})

    def current(self) -> str | None:
        """Return the name of the version to serve; None: the delivered drafter. May raise
        TrainError."""
        try:
            name = read_json(self.out / CURRENT)["version"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise TrainError(f"{CURRENT} cannot be read.") from None
        return None if name is None else str(name)

    def stamp(self) -> int:
        """Return a number that changes with current.json; 0: there is none."""
        try:
            found = (self.out / CURRENT).stat()
        except OSError:
            return 0
        return hash((found.st_mtime_ns, found.st_ino, found.st_size)) or 1

    def read(
        self, name: str | None, wanted: Callable[[str], bool] = lambda parameter: True
    ) -> dict[str, Tensor]:
        """Read the `wanted` parameters of a version (None: the delivered drafter), in the dtype
        they are stored in.

        Raises:
            TrainError: the version is missing, incomplete, not finite, or made for another drafter
                or target.
        """
        folder = self.drafter if name is None else self._checked(name)
        assert folder is not None  # for inspection only
        try:
            with opened(folder / WEIGHTS) as file:
                names = [each for each in file.keys() if each not in MAPPING_NAMES]  # noqa: SIM118
                tensors = {each: file.get_tensor(each) for each in names if wanted(each)}
        except CheckpointError as error:
            raise TrainError(f"The version {folder} cannot be read: {error}") from None
        if not all(torch.isfinite(each).all() for each in tensors.values()):
            raise TrainError(f"The weights in {folder} are not finite.")
        return tensors

    def staged(self, trunk: str) -> StagedVersion:
        """Read the current version, or only its heads if `trunk` serves already.

        Raises:
            TrainError: the version cannot be used, or was replaced and removed meanwhile.
        """
        name = self.current()
        facts = {} if name is None else facts_of(self.out / name)
        its = facts.get("trunk") or facts.get("checksum") or DELIVERED
        action = Action.HEADS if its == trunk else Action.FULL
        tensors = self.read(name, lambda each: trains(action, each))
        digest = facts.get("checksum") or self.fingerprints["drafter"]
        number, parent = number_of(name), number_of(facts.get("parent"))
        return StagedVersion(number, parent, action, tensors, int(digest[-15:], 16) or 1, its)

    def names(self) -> list[str]:
        """Return the names of the versions, oldest first."""
        found = (path.name for path in self.out.glob(f"{PREFIX}*"))
        return sorted(name for name in found if name.removeprefix(PREFIX).isdigit())

    def listed(self) -> dict[str, dict[str, Any]]:
        """Return facts by version, oldest first; unreadable facts are empty."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self.names()}
        for name in found:
            with suppress(TrainError):
                found[name] = facts_of(self.out / name)
        return found

    def prune(self, keep: int = KEPT) -> None:
        """Remove all but the newest versions and the current one; raises as `current`."""
        current = self.current()
        for name in self.names()[:-keep]:
            if name != current:
                # Rename first, so that an incomplete folder is never a version.
                gone = self.out / f".{name}"
                (self.out / name).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _checked(self, name: str) -> Path:
        folder = self.out / name
        if name not in self.names():
            known = ", ".join(self.names()) or "none"
            raise TrainError(f"There is no version {name} in {self.out}: choose one of {known}.")
        facts = facts_of(folder)
        for what, mine in self.fingerprints.items():
            if facts.get("fingerprints", {}).get(what) != mine:
                raise TrainError(f"The version {folder} was made for another {what}.")
        checksum = None
        with suppress(OSError):
            checksum = _digest(folder / WEIGHTS)
        if checksum is None or checksum != facts.get("checksum"):
            raise TrainError(f"The weights in {folder} do not match their checksum.")
        return folder


def trunk_of(drafter: SpecBlockModel) -> str:
    """Return a digest of all weights but those of the heads."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in drafter.named_parameters():
        if not trains(Action.HEADS, name):
            raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().tobytes())
    return digest.hexdigest()


def name_of(number: int) -> str | None:
    """Return a version's name; None: the delivered drafter, number 0."""
    return f"{PREFIX}{number:05d}" if number else None


def number_of(name: str | None) -> int:
    """Return a version's number; 0: the delivered drafter."""
    digits = str(name).removeprefix(PREFIX)
    return int(digits) if digits.isdigit() else 0


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the facts of a version; raises TrainError if they cannot be read."""
    try:
        facts = read_json(folder / provenance.FILE)["adaptation"]
        if isinstance(facts, dict) and isinstance(facts["fingerprints"], dict):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise TrainError(f"The version {folder} is incomplete: its {provenance.FILE} cannot be read.")


def fingerprint(drafter: Path) -> str:
    """Return a digest of a drafter's config and weights; raises TrainError if there is none."""
    try:
        return _digest(drafter / CONFIG)[:16] + _digest(drafter / WEIGHTS)
    except OSError as error:
        raise TrainError(
            f"The drafter's {error.filename} cannot be read: {error.strerror}."
        ) from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
