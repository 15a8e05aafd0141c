"""Versions as a serving drafter takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from vllm_specblock.adapt.policy.actions import trains
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.versions import VersionFolder, facts_of, number_of

DELIVERED = "delivered"
"""Trunk of the drafter as delivered, and of versions that differ from it in their heads alone."""


@dataclass(frozen=True, eq=False)
class StagedVersion:
    """A version that a serving drafter can take.

    Attributes:
        number: 0 for the drafter as delivered.
        parent: number of the version that training began from.
        action: HEADS: `tensors` are the LM head and the rank head, and the drafter serves the trunk
            already. FULL: all parameters.
        tensors: by the checkpoint's names, on the CPU.
        key: the same for the same weights in all processes, and for no others; never 0.
        trunk: equal for versions that differ in their heads alone.
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
        trunk: of the version that serves: of one with the same trunk only the heads are read.

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
