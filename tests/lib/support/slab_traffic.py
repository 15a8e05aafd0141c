"""Requests that come, run in steps, are preempted and go: in slabs, and beside in plain lists."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from support.late_device import LateDevice
from vllm_specblock.triton_kernels.feedback.record_step import record_step
from vllm_specblock.triton_kernels.feedback.slab_tensors import StepToRecord

from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS
from vllm_specblock.adapt.serving import slabs as slabs_module
from vllm_specblock.adapt.serving.slabs import Slabs
from vllm_specblock.feedback.verified_trees import VerifiedTrees

SLOTS, SLABS, HIDDEN, NODES, DEPTH = 5, 3, 2, 6, 4
REACH = DEPTH + 1
ROWS = PROMPT_ROWS + 3 * REACH
STOP = 7


@dataclass
class Plain:
    """One request as a reader sees it.

    `rows` are (position, token after it); None: not recorded.
    """

    name: str
    number: int
    prompt: int
    position: int
    began: float
    begin: int = 0
    rows: list[tuple[int, int]] | None = None
    sums: list[int] = field(default_factory=lambda: [0, 0, 0])
    ended: float | None = None


def state(number: int, position: int, layer: int) -> torch.Tensor:
    return torch.tensor([1000.0 * number + position, float(layer)])


class Engine:
    """Requests that come, run in steps, are preempted and go; with slabs beside plain lists."""

    def __init__(self, seed: int, rows: int = ROWS, device: LateDevice | None = None):
        self.draw, self.rows, self.device = random.Random(seed), rows, device
        self.slabs = Slabs(SLOTS + 1, HIDDEN, slabs=SLABS, rows=rows)
        if device is not None:
            if not isinstance(self.slabs.copies, slabs_module.PinnedSlabs):  # as on a GPU
                self.slabs.copies = slabs_module.PinnedSlabs(self.slabs.tensors)
            for tensors in (self.slabs.tensors, self.slabs.copies.rows):
                device.own(tensors)
            device.own(self.slabs.copies.sums)
        self.running: dict[int, Plain] = {}
        self.waiting: list[Plain] = []
        self.left: deque[Plain] = deque()
        self.parent = torch.arange(NODES, dtype=torch.int32).repeat(SLOTS + 1, 1)  # chains
        self.origin = torch.ones(SLOTS + 1, NODES, dtype=torch.uint8)
        self.number, self.now = 0, 0.0
        names = ["records", "moved", "ran out", "no slab", "resumed", "cached", "stopped", "late"]
        names += [] if device is None else ["on the way", "moved early"]
        self.seen: dict[str, int] = dict.fromkeys(names, 0)

    def come(self) -> None:
        slot = next((slot for slot in range(SLOTS) if slot not in self.running), None)
        if slot is None:
            return
        if self.waiting and self.draw.random() < 0.5:
            old = self.waiting.pop()
            name, number, prompt = old.name, old.number, old.position + 1
            self.seen["resumed"] += 1
        else:
            self.number += 1
            name, number = f"request {self.number}", self.number
            prompt = self.draw.choice([1, 2, 9, 63, 64, 65, 66, 130])
        cached = self.draw.randrange(prompt) if self.draw.random() < 0.4 else 0
        self.seen["cached"] += cached > max(0, prompt - PROMPT_ROWS)
        request = Plain(name, number, prompt, cached, self.now)
        request.begin = max(cached, prompt - PROMPT_ROWS)
        self.running[slot] = request
        if self.draw.random() < 0.2:
            return  # it opted out
        free = self.free()
        taken = self.slabs.begin(slot, name, prompt, cached, self.now, {STOP})
        assert taken == (free > 0)
        self.seen["no slab"] += not taken
        if taken:
            request.rows = []

    def go(self, slot: int, preempted: bool) -> None:
        if preempted:
            self.waiting.append(self.running[slot])
        self.leave(slot)
        del self.running[slot]

    def free(self) -> int:
        """Free slabs, by the plain lists."""
        if self.device is not None:
            return len(self.slabs.free)  # some are on their way to the host
        return SLABS - sum(each.rows is not None for each in self.running.values())

    def leave(self, slot: int) -> None:
        ended = self.slabs.end(slot, self.now)
        request = self.running[slot]
        assert ended == (request.rows is not None)
        if ended:
            self.left.append(replace(request, ended=self.now, sums=list(request.sums)))
            request.rows = None
        self.look()

    def look(self) -> None:
        """What left arrives, in its order."""
        for arrival in self.slabs.arrived():
            self.compare(self.left.popleft(), *arrival)
        if self.device is None:
            assert not self.left and len(self.slabs.free) == self.free()
        else:
            self.seen["on the way"] += bool(self.left)

    def compare(self, request: Plain, record, finished, last) -> None:
        misses, steps, committed = request.sums
        assert last == (request.ended is not None)
        if last and steps:
            assert (finished.misses, finished.steps, finished.tokens) == (misses, steps, committed)
            assert finished.seconds == request.ended - request.began
        else:
            assert finished is None
        rows = list(request.rows)
        labels = [position + 1 >= request.prompt for position, _ in rows]
        for index, (_, token) in enumerate(rows):
            if labels[index] and token == STOP:
                self.seen["stopped"] += index + 1 < len(rows)
                rows, labels = rows[: index + 1], labels[: index + 1]
                break
        if not any(labels):
            assert record is None
            return
        self.seen["records"] += 1
        assert record.request == request.name
        assert record.tokens.tolist() == [token for _, token in rows]
        assert record.labels.tolist() == labels
        for row, (position, _) in enumerate(rows):
            wanted = [state(request.number, position, layer) for layer in range(4)]
            assert torch.equal(record.states[row], torch.cat(wanted[:3]))
            assert torch.equal(record.last[row], wanted[3])
        assert record.tau == (committed / steps if finished is not None else 0.0)

    def step(self) -> None:
        """Some of the running requests, each a chunk of its prompt or what it accepted."""
        slots = [slot for slot in self.running if self.draw.random() < 0.8]
        if not slots:
            return
        self.now += 1.0
        self.slabs.copies.before_step()
        self.look()
        crowded = self.slabs.crowded(slots, REACH)
        for slot in slots:
            request = self.running[slot]
            full = bool(request.rows) and len(request.rows) + REACH > self.rows
            if self.device is None:
                assert full == (slot in crowded)
            else:  # which is some steps behind
                assert slot in crowded or not full
                self.seen["moved early"] += slot in crowded and not full
            if slot not in crowded:
                continue
            if self.free():
                assert self.slabs.move_on(slot)
                self.left.append(replace(request, rows=request.rows, sums=list(request.sums)))
                request.rows, request.begin = [], max(request.position, request.begin)
                self.seen["moved"] += 1
                self.look()
            else:
                assert not self.slabs.move_on(slot)
                self.leave(slot)
                self.seen["ran out"] += 1
        rows, newest = [], []  # (request, token, position, number of the request)
        run, accepted = torch.zeros(2, len(slots), dtype=torch.int64)
        for index, slot in enumerate(slots):
            request = self.running[slot]
            left = request.prompt - request.position
            if left > 0:
                count = min(self.draw.choice([1, 5, 40, 200]), left)
            else:
                count = self.draw.randint(1, REACH)
                run[index], accepted[index] = self.draw.randint(count - 1, NODES), count - 1
                self.count(request, int(run[index]), count - 1)
            for at in range(request.position, request.position + count):
                word = self.draw.choice([STOP, *range(20, 60)])
                rows.append((index, word, at, request.number))
                if request.rows is not None and at >= request.begin:
                    request.rows.append((at, word))
                    self.seen["late"] += len(request.rows) > self.rows
            newest.append(len(rows) - 1)
            request.position += count
        index, token, position, number = torch.tensor(rows).T.contiguous()
        states = [
            torch.stack([1000.0 * number + position, torch.full((len(rows),), float(layer))], 1)
            for layer in range(4)
        ]
        path = torch.arange(DEPTH + 1) * (torch.arange(DEPTH + 1) <= accepted[:, None])
        verified = VerifiedTrees(
            torch.tensor(slots), run, accepted.int(), path, None, self.origin, None
        )
        step = StepToRecord(
            index,
            torch.arange(len(rows)),
            token,
            position,
            position,
            torch.tensor(newest),
            tuple(states[:3]),
            states[3],
            verified,
            self.parent,
        )
        record = partial(record_step, self.slabs.tensors, step)
        record() if self.device is None else self.device.launch(record)

    def count(self, request: Plain, run: int, accepted: int) -> None:
        if request.rows is not None and run:
            step = (accepted < run, 1, accepted + 1)  # a node of a chain has a child, or none
            request.sums = [total + more for total, more in zip(request.sums, step)]


def serve(engine: Engine, length: int) -> Engine:
    for _ in range(length):
        what = engine.draw.random()
        if what < 0.25:
            engine.come()
        elif what < 0.30 and engine.running:
            engine.go(engine.draw.choice(list(engine.running)), preempted=True)
        elif what < 0.34 and engine.running:
            engine.go(engine.draw.choice(list(engine.running)), preempted=False)
        else:
            engine.step()
        if engine.device is not None:
            # Now and then it does nothing for a while.
            engine.device.go_on(engine.draw.choice([0, 0, 5, 20, 60]))
    for slot in list(engine.running):
        engine.go(slot, preempted=False)
    if engine.device is not None:
        engine.device.finish()
        engine.look()
    assert len(engine.slabs.free) == SLABS and not engine.slabs.parts and not engine.left
    assert (engine.slabs.tensors.of_slot == -1).all()
    return engine


def serve_late(seed: int, length: int) -> Engine:
    """The same, of slabs on a device that is behind."""
    with pytest.MonkeyPatch.context() as patch:
        device = LateDevice(seed)
        device.install(patch, slabs_module)
        with device:
            return serve(Engine(seed, PROMPT_ROWS + 9 * REACH, device), length)
