"""Slabs against plain lists: whatever comes and goes, a record is what was said."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_specblock.triton_kernels.feedback.record_step import record_step
from vllm_specblock.triton_kernels.feedback.slab_tensors import StepToRecord

from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS
from vllm_specblock.adapt.slabs import Slabs
from vllm_specblock.feedback.verified_trees import VerifiedTrees

SLOTS, SLABS, HIDDEN, NODES, DEPTH = 5, 3, 2, 6, 4
REACH = DEPTH + 1
ROWS = PROMPT_ROWS + 3 * REACH
STOP = 7


@dataclass
class Plain:
    """One request as whoever reads it sees it.

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


def state(number: int, position: int, layer: int) -> torch.Tensor:
    return torch.tensor([1000.0 * number + position, float(layer)])


class Engine:
    """Requests that come, run in steps, are preempted and go; with slabs beside plain lists."""

    def __init__(self, seed: int):
        self.draw, self.slabs = (
            random.Random(seed),
            Slabs(SLOTS + 1, HIDDEN, slabs=SLABS, rows=ROWS),
        )
        self.running: dict[int, Plain] = {}
        self.waiting: list[Plain] = []
        self.parent = torch.zeros(SLOTS + 1, NODES, dtype=torch.int32)
        self.origin = torch.zeros(SLOTS + 1, NODES, dtype=torch.uint8)
        self.number, self.now = 0, 0.0
        self.seen: dict[str, int] = dict.fromkeys(
            ("records", "moved", "ran out", "no slab", "resumed", "cached", "stopped", "late"), 0
        )

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
        """Slabs that nobody has, by the plain lists."""
        return SLABS - sum(each.rows is not None for each in self.running.values())

    def leave(self, slot: int) -> None:
        part = self.slabs.end(slot)
        request = self.running[slot]
        assert (part is not None) == (request.rows is not None)
        if part is None:
            return
        finished = self.slabs.finished(slot, part, self.now)
        misses, steps, committed = request.sums
        if steps:
            assert (finished.misses, finished.steps, finished.tokens) == (misses, steps, committed)
            assert finished.seconds == self.now - request.began
        else:
            assert finished is None
        record = self.compare(request, part, finished)
        if record is not None and finished is not None:
            assert (record.misses, record.steps, record.committed) == tuple(request.sums)
        request.rows = None

    def compare(self, request: Plain, part, finished=None):
        record = self.slabs.read(part, finished)
        rows = list(request.rows)
        labels = [position + 1 >= request.prompt for position, _ in rows]
        for index, (_, token) in enumerate(rows):
            if labels[index] and token == STOP:
                self.seen["stopped"] += index + 1 < len(rows)
                rows, labels = rows[: index + 1], labels[: index + 1]
                break
        if not any(labels):
            assert record is None
            return None
        self.seen["records"] += 1
        assert record.request == request.name
        assert record.tokens.tolist() == [token for _, token in rows]
        assert record.labels.tolist() == labels
        for row, (position, _) in enumerate(rows):
            wanted = [state(request.number, position, layer) for layer in range(4)]
            assert torch.equal(record.states[row], torch.cat(wanted[:3]))
            assert torch.equal(record.last[row], wanted[3])
        return record

    def step(self) -> None:
        """Some of the running requests, each a chunk of its prompt or what it accepted."""
        slots = [slot for slot in self.running if self.draw.random() < 0.8]
        self.draw.shuffle(slots)
        if not slots:
            return
        self.now += 1.0
        crowded = self.slabs.crowded(slots, REACH)
        for slot in slots:
            request = self.running[slot]
            full = request.rows and len(request.rows) + REACH > ROWS
            assert bool(full) == (slot in crowded)
            if not full:
                continue
            if self.free():
                self.compare(request, self.slabs.move_on(slot))
                request.rows, request.begin = [], request.position
                self.seen["moved"] += 1
            else:
                assert self.slabs.move_on(slot) is None
                self.leave(slot)
                self.seen["ran out"] += 1
        request_of, token, position, kept, newest, source = [], [], [], [], [], []
        states = [[] for _ in range(4)]
        run = torch.zeros(len(slots), dtype=torch.int64)
        accepted = torch.zeros(len(slots), dtype=torch.int32)
        path = torch.zeros(len(slots), DEPTH + 1, dtype=torch.int64)
        for index, slot in enumerate(slots):
            request, chunk = self.running[slot], self.draw.choice([1, 5, 40, 200])
            left = request.prompt - request.position
            count = min(chunk, left) if left > 0 else self.draw.randint(1, REACH)
            if left <= 0 and self.draw.random() < 0.8:
                run[index], accepted[index] = self.draw.randint(count - 1, NODES), count - 1
                self.parent[slot] = torch.tensor(self.draw.choices(range(-1, NODES), k=NODES))
                self.origin[slot] = int(self.draw.random() < 0.9)
                path[index, 1:count] = torch.arange(1, count)
                self.count(request, slot, int(run[index]), count - 1)
            padding = self.draw.randint(0, 2)
            for place in range(count + padding):
                at = request.position + place
                real = place < count
                word = self.draw.choice([STOP, *range(20, 60)]) if real else 0
                request_of.append(index)
                token.append(word)
                position.append(at)
                kept.append(at if real else -1)
                source.append(len(source))
                for layer in range(4):
                    states[layer].append(state(request.number, at, layer))
                if real and request.rows is not None and at >= request.begin:
                    request.rows.append((at, word))
                    self.seen["late"] += len(request.rows) > ROWS
            newest.append(len(token) - padding - 1)
            request.position += count
        order = torch.randperm(len(source))  # where the rows lie in the batch
        layers = [torch.stack(rows)[order.argsort()] for rows in states]
        record_step(
            self.slabs.tensors,
            StepToRecord(
                torch.tensor(request_of),
                order,
                torch.tensor(token),
                torch.tensor(position),
                torch.tensor(kept),
                torch.tensor(newest),
                tuple(layers[:3]),
                layers[3],
                VerifiedTrees(torch.tensor(slots), run, accepted, path, None, self.origin, None),
                self.parent,
            ),
        )

    def count(self, request: Plain, slot: int, run: int, accepted: int) -> None:
        if request.rows is None or not run or not self.origin[slot, 0]:
            return
        request.sums[0] += accepted in self.parent[slot, :run].tolist()
        request.sums[1] += 1
        request.sums[2] += accepted + 1


def serve(seed: int, length: int) -> Engine:
    engine = Engine(seed)
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
    for slot in list(engine.running):
        engine.go(slot, preempted=False)
    assert engine.slabs.free == SLABS and not engine.slabs.parts
    assert (engine.slabs.tensors.of_slot == -1).all()
    return engine


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 120))
def test_records_are_what_was_said(seed, length):
    serve(seed, length)


def test_everything_happens_in_it():
    """What the property is worth: all that can happen did."""
    total: dict[str, int] = {}
    for seed in range(12):
        for name, count in serve(seed, 300).seen.items():
            total[name] = total.get(name, 0) + count
    late = total.pop("late")
    assert late == 0, "a row found no place, which the plain lists would not show"
    assert all(total.values()), total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_record_has_the_dtype_of_the_target(dtype):
    slabs = Slabs(2, HIDDEN, dtype, slabs=1, rows=80)
    assert slabs.begin(0, "a", prompt=1, computed=0, now=0.0)
    assert not slabs.begin(1, "b", prompt=1, computed=0, now=0.0), "there is one slab"
    slabs.tensors.end[0] += 3
    record = slabs.read(slabs.end(0))
    assert record.states.dtype == record.last.dtype == dtype and len(record.tokens) == 3
    assert slabs.end(0) is None and slabs.begin(1, "b", prompt=1, computed=0, now=0.0)
