"""The version that a folder says is to serve, as one that a serving drafter can take."""

from __future__ import annotations

import torch

from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.versions import PREFIX, VersionFolder, facts_of
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError


def stored_version(versions: VersionFolder) -> StagedVersion | None:
    """All weights of the version that current.json names; number 0 is the drafter as delivered.

    Returns:
        None where nobody chose one, or it was removed while it was read: then another was chosen.

    Raises:
        TrainError: another was chosen, but cannot be used; the delivered drafter is to serve.
    """
    if not versions.stamp():
        return None
    folder, sentence = versions.current()
    if sentence is not None:
        raise TrainError(sentence)
    source = folder or versions.drafter
    assert source is not None  # a folder without its drafter is for a look only
    try:
        drafter = checkpoint.load(source, torch.float32)
        digest = facts_of(folder)["checksum"] if folder else versions.fingerprints["drafter"]
    except (checkpoint.CheckpointError, OSError, TrainError):
        return None
    tensors = {name: value.detach() for name, value in drafter.named_parameters()}
    number = int(source.name.removeprefix(PREFIX)) if folder else 0
    return StagedVersion(number, -1, Action.FULL, tensors, checksum=_number(digest))


def _number(digest: str) -> int:
    """A digest's last 60 bits; 1 where they are all 0."""
    return int(digest[-15:], 16) or 1
