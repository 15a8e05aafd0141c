"""Versions as folders: whole drafters, each with where it comes from, and one that is current.

    out/                      mode 0700: weights are as private as the text they learned from
      .lock                   whoever writes holds it
      current.json            which version serves, or none; replaced last
      version-00007/          a drafter's folder as `drafters/specblock/checkpoint.py` writes it,
      and
        provenance.json       its parent, action, rows and gain, checksum and fingerprints

Never a text, never a token.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from vllm_specblock.adapt.files import (
    digest,
    lock_folder,
    private_folder,
    read_json,
    sync,
    write_json,
)
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train import provenance
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.target import target_rows

CURRENT, PREFIX = "current.json", "version-"
KEPT = 8
"""Versions that are kept beside the current one: at 8 billion parameters each takes 1.4 GB."""


class VersionFolder:
    """The versions of one drafter for one target.

    Args:
        out: its folder, which need not be there yet.
        drafter, target: folders, as delivered; None: for a look only, and no version is refused
            because it was made for others.

    Attributes:
        fingerprints: of drafter and target.

    Raises:
        TrainError: the drafter or the target cannot be read.
    """

    def __init__(self, out: Path, drafter: Path | None = None, target: Path | None = None) -> None:
        self.out, self.drafter = out, drafter
        self.fingerprints: dict[str, str] = {}
        if drafter is not None:
            self.fingerprints["drafter"] = fingerprint(drafter)
        if target is not None:
            self.fingerprints["target"] = target_rows.fingerprint(target)
        self._lock: int | None = None

    def lock(self, inherited: int | None = None) -> int:
        """Become the one who writes, and clear away what another left half-written.

        Args:
            inherited: descriptor of the lock, where the parent process holds it.

        Returns:
            the lock's descriptor; whoever has it, a child too, holds the lock.

        Raises:
            TrainError: somebody else writes, or the folder cannot be made.
        """
        if self._lock is None:
            private_folder(self.out)
            self._lock = lock_folder(self.out) if inherited is None else inherited
            for left in self.out.glob(f".{PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
            for left in self.out.glob(".*.part"):
                left.unlink(missing_ok=True)
        return self._lock

    def unlock(self) -> None:
        """Let others write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, drafter: SpecBlockModel, facts: dict[str, Any]) -> str:
        """Write a version beside the others, whole or not at all; it is not current yet.

        Args:
            drafter: in the dtype in which it is to be stored.
            facts: `parent` (a version's name, or None), `action`, `rows`, `gain`.

        Returns:
            its name.
        """
        numbers = [int(path.name.removeprefix(PREFIX)) for path in self._folders()]
        name = f"{PREFIX}{max(numbers, default=0) + 1:05d}"
        aside = self.out / f".{name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        checkpoint.save(drafter, aside)
        facts = {
            **facts,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "checksum": digest(aside / checkpoint.WEIGHTS),
            "fingerprints": self.fingerprints,
        }
        provenance.write(aside, {"adaptation": facts, **provenance.provenance()})
        for path in aside.iterdir():
            path.chmod(0o600)
            sync(path)
        sync(aside)
        aside.rename(self.out / name)
        sync(self.out)
        return name

    def use(self, name: str | None, who: str = "trainer") -> None:
        """Make a version current; None: the drafter as delivered.

        Args:
            who: chose it, `trainer` or `person`.

        Raises:
            TrainError: there is no such version, or it cannot be used; nothing changes.
        """
        if name is not None:
            self.check(name)
        write_json(self.out / CURRENT, {"version": name, "by": who, "time_ns": time.time_ns()})

    def current(self) -> tuple[Path | None, str | None]:
        """What is to serve.

        Returns:
            a version's folder or None for the drafter as delivered, and None or the sentence that
            says why what is current cannot be used.
        """
        try:
            name = read_json(self.out / CURRENT)["version"]
            if name is not None:
                self.check(name)
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = str(error) if isinstance(error, TrainError) else f"{CURRENT} cannot be read."
            return None, (
                f"The current version in {self.out} cannot be used, and what serves stays: {said}"
            )
        return (None if name is None else self.out / name), None

    def chosen(self) -> dict[str, Any]:
        """What current.json says: `version`, `by`, `time_ns`; empty where it says nothing."""
        try:
            said = read_json(self.out / CURRENT)
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    def stamp(self) -> int:
        """Changes whenever current.json does, readable or not; 0 where there is none."""
        try:
            found = (self.out / CURRENT).stat()
        except OSError:
            return 0
        return hash((found.st_mtime_ns, found.st_ino, found.st_size)) or 1

    def check(self, name: str) -> None:
        """Raises TrainError unless the version is whole, finite and of this drafter and target."""
        folder = self.out / str(name)
        if not str(name).startswith(PREFIX) or folder.parent != self.out or not folder.is_dir():
            known = ", ".join(path.name for path in self._folders()) or "none"
            raise TrainError(f"There is no version {name} in {self.out}: choose one of {known}.")
        facts = facts_of(folder)
        for what, mine in self.fingerprints.items():
            if facts.get("fingerprints", {}).get(what) != mine:
                raise TrainError(f"The version {folder} was made for another {what}.")
        weights = folder / checkpoint.WEIGHTS
        if not weights.is_file() or digest(weights) != facts.get("checksum"):
            raise TrainError(f"The weights in {folder} are not those that were written there.")
        try:
            tensors = checkpoint.read_tensors(folder, checkpoint.read_config(folder))
        except checkpoint.CheckpointError as error:
            raise TrainError(f"The version {folder} cannot be read: {error}") from None
        if not all(
            torch.isfinite(each).all() for each in tensors.values() if each.is_floating_point()
        ):
            raise TrainError(f"The weights in {folder} are not finite.")

    def listed(self) -> dict[str, dict[str, Any]]:
        """Facts by version, the oldest first; empty facts where they cannot be read."""
        found = {}
        for folder in self._folders():
            try:
                found[folder.name] = facts_of(folder)
            except TrainError:
                found[folder.name] = {}
        return found

    def prune(self, keep: int = KEPT) -> None:
        """Remove all but the newest versions and the current one."""
        current = self.chosen().get("version")
        for folder in self._folders()[:-keep]:
            if folder.name != current:
                # Renamed first: half a folder is never a version.
                gone = self.out / f".{folder.name}"
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _folders(self) -> list[Path]:
        found = self.out.glob(f"{PREFIX}*")
        return sorted(path for path in found if path.name.removeprefix(PREFIX).isdigit())


def facts_of(folder: Path) -> dict[str, Any]:
    """What `write` was told of a version, with its checksum and fingerprints.

    Raises:
        TrainError: it says nothing that can be read.
    """
    try:
        facts = read_json(folder / provenance.FILE)["adaptation"]
        if isinstance(facts, dict):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise TrainError(f"The version {folder} is not whole: its {provenance.FILE} cannot be read.")


def fingerprint(drafter: Path) -> str:
    """Changes with any byte of a drafter's config and weights.

    Raises:
        TrainError: there is no such drafter.
    """
    try:
        return digest(drafter / checkpoint.CONFIG)[:16] + digest(drafter / checkpoint.WEIGHTS)
    except OSError as error:
        raise TrainError(
            f"The drafter's {error.filename} cannot be read: {error.strerror}."
        ) from None
