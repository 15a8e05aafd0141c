"""Versions ready for a serving drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from vllm_specblock.adapt.policy.actions import trains
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.versions import VersionFolder, facts_of, number_of

DELIVERED = "delivered"
"""Trunk of the delivered drafter, and of versions that differ only in their heads."""


@dataclass(frozen=True, eq=False)
class StagedVersion:
    """A version that a serving drafter can load.

    Attributes:
        number: 0 for the drafter as delivered.
        parent: number of the version that training started from.
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


def current_version(versions: VersionFolder, trunk: str) -> StagedVersion:
    """Read the version that current.json names.

    Args:
        trunk: of the serving version; with the same trunk only the heads are read.

    Raises:
        TrainError: the version cannot be used, or was replaced and removed meanwhile.
    """
    name = versions.current()
    facts = {} if name is None else facts_of(versions.out / name)
    its = facts.get("trunk") or facts.get("checksum") or DELIVERED
    action = Action.HEADS if its == trunk else Action.FULL
    tensors = versions.read(name, lambda each: trains(action, each))
    digest = facts.get("checksum") or versions.fingerprints["drafter"]
    number, parent = number_of(name), number_of(facts.get("parent"))
    return StagedVersion(number, parent, action, tensors, int(digest[-15:], 16) or 1, its)
