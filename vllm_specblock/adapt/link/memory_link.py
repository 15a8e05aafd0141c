"""Shared memory of an engine and its trainer: finished requests one way, versions the other.

The engine's end, in short:

    link = EngineLink(LinkSizes(shapes_of(config), hidden, dtype, item))
    link.offer(record, finished)          -> bool      False: there is no room
    link.staged()                         -> StagedVersion | None     each version once
    link.took(version, seconds)           -> None      after the turn: it serves now
    link.refuse(version, reason)          -> None      it cannot serve
    link.beat()                           -> None      `TrainerProcess` does it, too
    link.counts                           -> dict[str, int]    of both ends, for the metrics
    link.close()                          -> None
    TrainerProcess(TrainerConfig(...), link).start()                  in trainer/process.py

None of them waits for the trainer, whatever that one does or is.
"""

from __future__ import annotations

import time

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.link import wire
from vllm_specblock.adapt.link.layout import COUNTS, Field, LinkSizes, Shared
from vllm_specblock.adapt.link.shared import PAGE, SharedMemory, aligned, fence
from vllm_specblock.adapt.link.shared_versions import SharedVersions
from vllm_specblock.adapt.link.staging import Shapes, StagedVersion, Staging
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.train.config import TrainError


class EngineLink(SharedVersions):
    """The engine's end, which makes the memory. For one thread.

    Args:
        sizes: see `LinkSizes`.

    Attributes:
        descriptor: of the memory, for the trainer.
    """

    def __init__(self, sizes: LinkSizes) -> None:
        slot = wire.slot_size(sizes.rows, 3 * sizes.hidden, sizes.hidden, sizes.item)
        ring = aligned(sizes.slots * slot, PAGE)
        memory = SharedMemory(PAGE + ring + Staging.size_of(sizes.shapes, sizes.dtype))
        head = memory.numbers(0, len(Field))
        head[Field.SLOTS], head[Field.SLOT_SIZE] = sizes.slots, slot
        head[Field.STAGING_AT] = PAGE + ring
        head[Field.DTYPE] = wire.DTYPES.index(sizes.dtype)
        self.descriptor = memory.descriptor
        super().__init__(Shared(memory, sizes.shapes))
        self.beat()

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool:
        """Hand a finished request to the trainer: some milliseconds at most, for the copy.

        Args:
            record: on the CPU; None: the request was not recorded.
            finished: None: the request goes on in another record.

        Returns:
            whether it was taken: the ring may be full, or the record too long for it.
        """
        slot = self._shared.free_slot()
        if slot is None or wire.write(slot, wire.Finished(record, finished)) is not None:
            return False
        fence()
        self._shared.head[Field.WRITTEN] += 1
        return True

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        """As every reader's; the trainer is told."""
        super().took(version, seconds)
        head = self._shared.head
        head[Field.TAKEN], head[Field.SERVES] = version.sequence, version.number
        place = Field.SWAP_FULL if version.action is Action.FULL else Field.SWAP_HEADS
        head[place] = round(1e9 * seconds)

    def restarted(self) -> None:
        """Another trainer took the place of one that died."""
        self._shared.count("trainer_restarts")

    def beat(self) -> None:
        """The engine lives."""
        self._shared.head[Field.ENGINE_BEAT] = time.monotonic_ns()

    @property
    def silence(self) -> float:
        """Seconds since the trainer said last that it lives; infinite where it never did."""
        return self._shared.silence(Field.TRAINER_BEAT)

    @property
    def counts(self) -> dict[str, int]:
        """By `COUNTS`, of both ends since the start."""
        return dict(zip(COUNTS, self._shared.counts.tolist()))

    def close(self) -> None:
        """Tell the trainer to end. The memory goes with the last process that has it."""
        self._shared.head[Field.CLOSED] = 1


class TrainerLink:
    """The trainer's end.

    Args:
        descriptor: of the memory.
        shapes: of the drafter's parameters, the engine's.

    Attributes:
        staging: where versions are offered, and recovered after a start.

    Raises:
        TrainError: the memory was made for another drafter.
    """

    def __init__(self, descriptor: int, shapes: Shapes) -> None:
        memory = SharedMemory(descriptor=descriptor)
        head = memory.numbers(0, len(Field))
        size = head[Field.STAGING_AT] + Staging.size_of(shapes, wire.DTYPES[head[Field.DTYPE]])
        if size != memory.size:
            raise TrainError(
                f"The engine shares {memory.size} bytes, but this drafter needs {size}: engine "
                "and trainer have to be given the same drafter."
            )
        self._shared = Shared(memory, shapes)
        self.staging = self._shared.staging
        self.beat()

    def next(self) -> wire.Finished | None:
        """The oldest message, in memory of its own; None where none waits."""
        head = self._shared.head
        if head[Field.READ] >= head[Field.WRITTEN]:
            return None
        fence()
        try:
            return wire.read(self._shared.slot(head[Field.READ]))
        except ValueError:
            self.count("dropped_records")
            return None
        finally:
            fence()
            head[Field.READ] += 1

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of `COUNTS`, of the trainer's own."""
        self._shared.count(name, by)

    def stage(self, version: Version) -> None:
        """Offer a version to the engine; one that it did not take yet is replaced."""
        self.staging.write(version)
        self.count("versions_offered")

    def swap_seconds(self, action: Action) -> float:
        """What the engine's last swap of an action took from serving."""
        place = Field.SWAP_FULL if action is Action.FULL else Field.SWAP_HEADS
        return 1e-9 * self._shared.head[place]

    @property
    def serves(self) -> int:
        """Number of the version that the engine took last; 0: the drafter as delivered."""
        return self._shared.head[Field.SERVES]

    def beat(self) -> None:
        """The trainer lives."""
        self._shared.head[Field.TRAINER_BEAT] = time.monotonic_ns()

    @property
    def silence(self) -> float:
        """Seconds since the engine said last that it lives."""
        return self._shared.silence(Field.ENGINE_BEAT)

    @property
    def closed(self) -> bool:
        """The engine told the trainer to end."""
        return bool(self._shared.head[Field.CLOSED])
