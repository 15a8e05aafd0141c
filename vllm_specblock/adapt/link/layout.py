"""Where things are in the memory of a link: numbers, counts, the ring, the staging area."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum

import torch

from vllm_specblock.adapt.learning.train_batches import ROWS
from vllm_specblock.adapt.link import wire
from vllm_specblock.adapt.link.shared import PAGE, SharedMemory
from vllm_specblock.adapt.link.staging import Shapes, Staging
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.drafters.specblock.model import SpecBlockModel

COUNTS = (
    "swaps",
    "swap_microseconds",
    "versions_refused_checksum",
    "versions_refused_not_finite",
    "trainer_restarts",
    # The trainer's own.
    "updates_heads",
    "updates_full",
    "update_microseconds_heads",
    "update_microseconds_full",
    "versions_offered",
    "versions_refused_not_better",
    "versions_refused_weights",
    "rollbacks",
    "judged_requests",
    "judged_gain_millitokens",
    "dropped_records",
)
"""Each has one writer, so nothing is lost. What was recorded, and what not, the engine's recorder
counts. `versions_refused_weights`: training made them NaN or infinite, and they were never
staged."""


BEAT, SILENCE = 0.5, 300.0
"""Seconds between two beats of either end, and after which the other one takes it for dead: it may
be starved by everything else on the machine."""


class Field(IntEnum):
    """Numbers at the beginning of the memory. Those of the layout never change; of the others each
    has one writer."""

    SLOTS = 0
    SLOT_SIZE = 1
    DTYPE = 2
    STAGING_AT = 3
    WRITTEN = 4  # messages so far: the engine
    READ = 5  # of them: the trainer
    ENGINE_BEAT = 6  # monotonic clock, ns
    TRAINER_BEAT = 7
    TAKEN = 8  # sequence number of the version that serves: the engine
    SERVES = 9  # its number
    SWAP_HEADS = 10  # ns of the last: the engine
    SWAP_FULL = 11
    CLOSED = 12


@dataclass(frozen=True)
class LinkSizes:
    """What the shared memory has to hold.

    Attributes:
        shapes: of the drafter's parameters.
        hidden: Ht, of the target.
        dtype: of staged weights; the one that serves is enough.
        item: bytes of a number in a record's states.
        slots: finished requests that may wait for the trainer; what comes then is dropped.
        rows: W, of a record at most.
    """

    shapes: Shapes
    hidden: int
    dtype: torch.dtype = torch.float32
    item: int = 4
    slots: int = 16
    rows: int = ROWS


class Shared:
    """The parts of the memory, at either end: a page of numbers, the ring, the staging area.

    Args:
        memory: whose layout stands in its numbers already.
        shapes: of the drafter's parameters.
    """

    def __init__(self, memory: SharedMemory, shapes: Shapes) -> None:
        self.head = memory.numbers(0, len(Field))
        self.counts = memory.numbers(8 * len(Field), len(COUNTS))
        self.memory = memory
        dtype = wire.DTYPES[self.head[Field.DTYPE]]
        self.staging = Staging(memory, self.head[Field.STAGING_AT], shapes, dtype)

    def slot(self, number: int) -> memoryview:
        """Of a message by its number."""
        size = self.head[Field.SLOT_SIZE]
        return self.memory.part(PAGE + number % self.head[Field.SLOTS] * size, size)

    def free_slot(self) -> memoryview | None:
        """Where the next message goes; None: the ring is full."""
        written = self.head[Field.WRITTEN]
        waiting = written - self.head[Field.READ]
        return None if waiting >= self.head[Field.SLOTS] else self.slot(written)

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of `COUNTS`."""
        self.counts[COUNTS.index(name)] += by

    def silence(self, place: int) -> float:
        """Seconds since a beat; infinite where there was none."""
        beat = self.head[place]
        return 1e-9 * (time.monotonic_ns() - beat) if beat else float("inf")


def shapes_of(config: DrafterConfig) -> Shapes:
    """Of the parameters of a drafter, by name."""
    with torch.device("meta"):
        drafter = SpecBlockModel(config)
    return {name: value.shape for name, value in drafter.named_parameters()}
