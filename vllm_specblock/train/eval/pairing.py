"""A drafter's folder and its target's, found to belong together before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_specblock.drafters.common.hub import target_folder
from vllm_specblock.train.config import TrainError


@dataclass(frozen=True)
class Pairing:
    """A drafter and the target that it drafts for.

    Attributes:
        kind: of drafter, as registered.
        layer_ids: target layers whose states the drafter reads, low ones first.
        vocab_size: of the target.
    """

    drafter: Path
    target: Path
    kind: str
    layer_ids: tuple[int, ...]
    vocab_size: int


def target_of(drafter: Path, target: Path | None, name: str | None) -> Path:
    """The folder of a drafter's target: the one that is given, or the one its config names.

    Args:
        target, name: folders or hub ids.

    Raises:
        TrainError: neither is a folder here.
    """
    if target is not None:
        return target_folder(target)
    folder = None if name is None else target_folder(name)
    if folder is None or not folder.is_dir():
        said = "names no target" if name is None else f"is for {name}, which is no folder here"
        raise TrainError(f"The drafter in {drafter} {said}; give the target's with --target.")
    return folder
