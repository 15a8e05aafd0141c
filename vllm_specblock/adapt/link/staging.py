"""A version's weights in shared memory: one writes, others read, and nobody waits.

The writer makes the sequence number odd, writes, and makes it even again: who read meanwhile sees
another number than before and comes back later. Every tensor has a checksum, so that neither a
writer that died half-way nor a stray write is taken for a version.

Only what changed is written, the heads at least. A tensor remembers the sequence number of its last
write: so a reader knows, whatever it missed in between, whether the heads are all that it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.link.shared import SharedMemory, aligned, checksum, fence, tensor_in
from vllm_specblock.adapt.policy.actions import action_between, trains
from vllm_specblock.adapt.policy.interface import Action

Shapes = Mapping[str, torch.Size]
"""Of a drafter's parameters, by name."""

_SEQUENCE, _NUMBER, _PARENT, _ACTION, _FIELDS = range(5)
_ACTIONS = tuple(Action)


@dataclass(frozen=True, eq=False)
class StagedVersion:
    """A version that a serving drafter can take.

    Attributes:
        number: unique; 0 for the drafter as delivered.
        parent: number of the version that training began from; −1: none.
        action: HEADS: `tensors` are the LM head and the rank head, and whoever took what was
            staged before lacks no more. FULL: all parameters.
        tensors: by the checkpoint's names, on the CPU, of the reader's own.
        sequence: of the staging; 0: it was stored.
        checksum: of a stored version's weights.
    """

    number: int
    parent: int
    action: Action
    tensors: Mapping[str, Tensor] = field(repr=False)
    sequence: int = 0
    checksum: int = 0

    @property
    def key(self) -> int:
        """The same in all processes that read these weights, and of no others; never 0."""
        return self.sequence or self.checksum


class Staging:
    """The area of staged weights, at either end.

    Args:
        memory: shared.
        offset: bytes; the area takes `size_of(shapes, dtype)` from there.
        shapes: of the drafter's parameters.
        dtype: of the weights in the area.
    """

    def __init__(
        self, memory: SharedMemory, offset: int, shapes: Shapes, dtype: torch.dtype
    ) -> None:
        self.dtype, self.shapes = dtype, dict(shapes)
        count = _FIELDS + 2 * len(self.shapes)
        self._head = memory.numbers(offset, count)
        self._parts: dict[str, memoryview] = {}
        self._place = {name: _FIELDS + 2 * index for index, name in enumerate(self.shapes)}
        place = offset + aligned(8 * count)
        for name, shape in self.shapes.items():
            size = shape.numel() * dtype.itemsize
            self._parts[name] = memory.part(place, size)
            place += aligned(size)
        self._written: Mapping[str, Tensor] = {}

    @staticmethod
    def size_of(shapes: Shapes, dtype: torch.dtype) -> int:
        """Bytes."""
        head = aligned(8 * (_FIELDS + 2 * len(shapes)))
        return head + sum(aligned(shape.numel() * dtype.itemsize) for shape in shapes.values())

    @property
    def sequence(self) -> int:
        """Odd while somebody writes; 0: nothing was ever staged."""
        return self._head[_SEQUENCE]

    @property
    def number(self) -> int:
        """Of the version staged last."""
        return self._head[_NUMBER]

    def know(self, tensors: Mapping[str, Tensor]) -> None:
        """What the readers have already: θ_0 in the beginning, what was recovered after a start."""
        self._written = dict(tensors)

    def write(self, version: Version) -> None:
        """Stage a version."""
        tensors = version.tensors
        action = action_between(self._written, tensors)
        sequence = self.sequence | 1  # odd already where a writer died
        self._head[_SEQUENCE] = sequence
        fence()
        for name, part in self._parts.items():
            if trains(action, name):
                tensor_in(part, self.dtype, self.shapes[name]).copy_(tensors[name].detach())
                self._head[self._place[name]] = sequence + 1
                self._head[self._place[name] + 1] = checksum(part)
        self._head[_NUMBER] = version.number
        self._head[_PARENT] = -1 if version.parent is None else version.parent
        self._head[_ACTION] = _ACTIONS.index(version.action)
        fence()
        self._head[_SEQUENCE] = sequence + 1
        self._written = dict(tensors)

    def read(self, after: int) -> StagedVersion | str | None:
        """Copy what was staged.

        Args:
            after: sequence number of what the reader has.

        Returns:
            the version; None where there is none yet, or it is being written; or why it is
            refused: `checksum`, `not finite`.
        """
        sequence = self.sequence
        if sequence == 0 or sequence % 2:
            return None
        fence()
        number, parent = self._head[_NUMBER], self._head[_PARENT]
        since = {name: self._head[place] for name, place in self._place.items()}
        whole = any(
            written > after for name, written in since.items() if not trains(Action.HEADS, name)
        )
        action = Action.FULL if whole else Action.HEADS
        tensors, reason = self._copy([name for name in since if trains(action, name)])
        fence()
        if self.sequence != sequence:
            return None
        return reason or StagedVersion(number, parent, action, tensors, sequence)

    def recover(self, origin: Mapping[str, Tensor]) -> Version | None:
        """The version staged last, for a writer that comes after another; None where it is torn,
        or none was.

        Args:
            origin: θ_0, whose tensors are those that were never staged.
        """
        if self.sequence == 0 or self.sequence % 2:
            return None
        names = [name for name, place in self._place.items() if self._head[place]]
        tensors, reason = self._copy(names)
        if reason:
            return None
        parent = self._head[_PARENT]
        version = Version(
            self._head[_NUMBER],
            {name: tensors.get(name, origin[name]).to(origin[name].dtype) for name in origin},
            _ACTIONS[self._head[_ACTION]],
            None if parent < 0 else parent,
        )
        self.know(version.tensors)
        return version

    def _copy(self, names: list[str]) -> tuple[dict[str, Tensor], str | None]:
        """Copies of some tensors, and what is wrong with them."""
        copies, reason = {}, None
        for name in names:
            part = self._parts[name]
            copy = tensor_in(part, torch.uint8, (len(part),)).clone()
            if checksum(copy.numpy().data) != self._head[self._place[name] + 1]:
                return {}, "checksum"
            copies[name] = copy.view(self.dtype).view(self.shapes[name])
            if not torch.isfinite(copies[name]).all():
                reason = "not finite"
        return copies, reason
