"""Rows of finished requests in host memory, never on disk.

New rows are trained on once, then enter the reservoir for rehearsal. One request in five is held
out for judging: the recent ones, and a sample of the old ones.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError

JUDGED_EVERY = 5
"""One request in this many is held out for judging."""

LEAST_DISTINCT = 0.1
"""Share of distinct tokens below which a text is a loop."""


@dataclass(frozen=True, eq=False)
class Record:
    """W rows of one request; row i belongs to the token x_p, p = begin + i.

    Attributes:
        request: id, of one or several records.
        states: [W, 3·Ht], the target's residual stream at x_p, columns low, mid, high.
        last: [W, Ht], what the target's LM head reads at x_p.
        tokens: [W] int64, x_{p+1}.
        labels: [W] bool, the target generated x_{p+1}. Rows of the prompt come first.
        tau: tokens per step of its request; 0: unknown.
    """

    request: str
    states: Tensor
    last: Tensor
    tokens: Tensor
    labels: Tensor
    tau: float = 0.0

    def __post_init__(self) -> None:
        lengths = [len(part) for part in self._tensors]
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ValueError(
                f"A record's states, last, tokens and labels have one length of at least 1, not "
                f"{lengths}."
            )

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.states, self.last, self.tokens, self.labels

    @property
    def weight(self) -> float:
        """1 / τ²: steps per token saved by one more token of τ; 1 if τ is unknown."""
        return self.tau**-2 if self.tau else 1.0

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.numel() * part.element_size() for part in self._tensors)

    @property
    def judged(self) -> bool:
        """Whether its request is held out for judging."""
        digest = hashlib.sha256(self.request.encode()).digest()
        return int.from_bytes(digest[:8], "big") % JUDGED_EVERY == 0


class Queue:
    """The newest records within a number of bytes; older ones are passed to `leaving`."""

    def __init__(self, room: int, leaving: Reservoir) -> None:
        self.room, self.leaving = room, leaving
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        self.records.append(record)
        while sum(each.size for each in self.records) > self.room:
            self.leaving.add(self.records.pop(0))


class Reservoir:
    """A uniform sample of all added records within a number of bytes: each draws a number, and the
    smallest are kept."""

    def __init__(self, room: int, draw: random.Random) -> None:
        self.room, self.draw = room, draw
        self._kept: list[tuple[float, Record]] = []

    @property
    def records(self) -> list[Record]:
        return [record for _, record in self._kept]

    def add(self, record: Record) -> None:
        self._kept.append((self.draw.random(), record))
        while sum(each.size for _, each in self._kept) > self.room:
            self._kept.remove(max(self._kept, key=lambda entry: entry[0]))

    def sample(self, count: int) -> list[Record]:
        """Draw up to `count` records by `Record.weight`, with replacement."""
        records = self.records
        weights = [each.weight for each in records]
        return self.draw.choices(records, weights, k=min(count, len(records))) if records else []


class Book:
    """Rows of finished requests in four parts: new ones, the reservoir, `recent` and `old`.

    memory: MiB of rows; each part has a quarter. counts: records by what became of them:
    `recorded`, `not finite`, `loop`.
    """

    def __init__(self, memory: float = 512, seed: int = 0) -> None:
        if not 0 < memory < float("inf"):
            raise TrainError(f"memory is {memory} MiB, but must be above 0 and finite.")
        room, self.draw = int(memory * (1 << 20)) // 4, random.Random(seed)
        self.reservoir, self.old = Reservoir(room, self.draw), Reservoir(room, self.draw)
        self._new, self.recent = Queue(room, self.reservoir), Queue(room, self.old)
        self.counts: Counter[str] = Counter()

    @property
    def new(self) -> list[Record]:
        """Records not trained on yet, oldest first."""
        return list(self._new.records)

    def add(self, record: Record) -> bool:
        """Add a record; return whether it was kept, else count the reason."""
        reason = _refusal(record)
        self.counts[reason or "recorded"] += 1
        if reason:
            return False
        (self.recent if record.judged else self._new).add(record)
        return True

    def pass_over(self, count: int) -> None:
        """Move all new records but those of the newest `count` requests to the reservoir.

        After a while without updates, current texts are trained on first.
        """
        newest = list(dict.fromkeys(each.request for each in reversed(self._new.records)))[:count]
        for record in self.new:
            if record.request not in newest:
                self._new.records.remove(record)
                self.reservoir.add(record)

    def take(self, count: int) -> list[Record]:
        """Move up to `count` new records of distinct requests to the reservoir; return them."""
        taken: dict[str, Record] = {}
        for record in self._new.records:
            if len(taken) < count:
                taken.setdefault(record.request, record)
        chosen = list(taken.values())
        # A second record of a request waits for the next update.
        self._new.records = [each for each in self._new.records if each not in chosen]
        for record in chosen:
            self.reservoir.add(record)
        return chosen


def _refusal(record: Record) -> str | None:
    if not all(bool(torch.isfinite(rows).all()) for rows in (record.states, record.last)):
        return "not finite"
    if len(record.tokens.unique()) < LEAST_DISTINCT * len(record.tokens):
        return "loop"
    return None
