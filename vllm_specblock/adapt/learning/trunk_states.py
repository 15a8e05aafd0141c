"""What the heads read along recorded texts, kept for versions that differ in their heads alone.

The layers below run once over a text, however many such versions are judged on it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy.actions import Tensors, trains
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.eval.chain import states_along
from vllm_specblock.train.learner import EvalSequence

MEMORY = 512
"""MiB, on the device that judges: 16 of an 8B target's longest records."""


class TrunkStates:
    """States of the records that were used last.

    Args:
        trunk: of a version; its heads do not count.
        memory: of states, MiB.
    """

    def __init__(self, trunk: Tensors, memory: float = MEMORY) -> None:
        self._same, self._most = [trunk], int(memory * 2**20)
        self._serves: dict[int, bool] = {}
        self._kept: WeakKeyDictionary[Record, Tensor] = WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Of the kept states; those of a dropped record are dropped."""
        return sum(states.nbytes for states in self._kept.values())

    def serve(self, version: Version) -> bool:
        """Return whether a version has this trunk; of one from a folder the values are compared."""
        if version.number not in self._serves:
            self._serves[version.number] = self._is_same(version.tensors)
        return self._serves[version.number]

    def along(
        self, drafter: SpecBlockModel, record: Record, text: EvalSequence, blocks: int
    ) -> Tensor:
        """See `states_along`; `text` is the record's."""
        states = self._kept.pop(record, None)
        if states is None:
            states = states_along(drafter, text, blocks)
        self._kept[record] = states  # behind all others
        while self.bytes > self._most:
            del self._kept[next(iter(self._kept))]
        return states

    def _is_same(self, tensors: Tensors) -> bool:
        names = [name for name in tensors if not trains(Action.HEADS, name)]
        if any(all(tensors[name] is each[name] for name in names) for each in self._same):
            return True
        if not all(torch.equal(tensors[name], self._same[0][name]) for name in names):
            return False
        self._same[1:] = [tensors]
        return True
