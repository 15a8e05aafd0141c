"""What the heads read along recorded texts, kept for versions that differ in nothing but the heads.

Where only heads are learned, the layers below them stay as they came, so they need to run once over
a text however many versions are judged on it.
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
"""MiB, on the device that judges: of an 8B target's drafter the 16 longest records that an offer is
judged on, 32 MiB each."""


class TrunkStates:
    """States of the records that were asked for last.

    Args:
        trunk: of a version; its heads do not count.
        memory: of states, MiB; those that were not asked for longest go first.
    """

    def __init__(self, trunk: Tensors, memory: float = MEMORY) -> None:
        self._same, self._most = [trunk], int(memory * 2**20)
        self._serves: dict[int, bool] = {}
        self._kept: WeakKeyDictionary[Record, Tensor] = WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Of the states that are kept; a record that goes takes its own along."""
        return sum(states.nbytes for states in self._kept.values())

    def serve(self, version: Version) -> bool:
        """Whether a version has this trunk. One that was read from a folder has tensors of its own:
        their values are compared, once for it and all that is learned from it."""
        if version.number not in self._serves:
            self._serves[version.number] = self._is_same(version.tensors)
        return self._serves[version.number]

    def along(
        self, drafter: SpecBlockModel, record: Record, text: EvalSequence, blocks: int
    ) -> Tensor:
        """See `states_along`; the drafter has this trunk, and `text` is the record's."""
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
