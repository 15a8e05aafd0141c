"""Slabs against plain lists: requests come, run in steps, are preempted and go."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm_specblock.triton_kernels.feedback.record_step import StepToRecord, record_step

from vllm_specblock.adapt.learning.train_batches import PROMPT_ROWS
from vllm_specblock.adapt.serving import slabs as slabs_module
from vllm_specblock.adapt.serving.slabs import Slabs
from vllm_specblock.feedback.verified_trees import VerifiedTrees

_WRITES = {"aten::copy_", "aten::fill_", "aten::_foreach_copy_", "aten::zero_"}


class LateDevice(TorchDispatchMode):
    """A context in which writes into the device's memory are queued.

    Stands in for CUDA: they are done later, in any order that streams and events allow.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.draw, self.memory, self.streams = random.Random(seed), set(), []
        self.current = self._stream()

    def install(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Give a module its streams and events, and host memory in place of pinned memory."""
        patch.setattr(module, "Event", partial(Event, self))
        patch.setattr(module, "Stream", self._stream)
        patch.setattr(module, "stream", self._on)
        for name in ("zeros", "empty"):
            patch.setattr(torch, name, _without_pins(getattr(torch, name)))

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory of the device, or pinned memory that it writes to."""
        self.memory |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue something on the current stream."""
        self.current.queue.append((lambda: False, kernel))

    def go_on(self, most: int) -> None:
        """Do up to so many things, each the next of a stream that does not wait."""
        with _disable_current_modes(), torch.inference_mode():
            for _ in range(most):
                ready = [each for each in self.streams if each.queue and not each.queue[0][0]()]
                if not ready:
                    return
                self.draw.choice(ready).queue.popleft()[1]()

    def finish(self) -> None:
        """Do all that is queued."""
        self.go_on(1 << 30)
        assert not any(each.queue for each in self.streams), "streams wait for each other"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in _WRITES:
            written = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            if any(tensor.untyped_storage()._cdata in self.memory for tensor in written):
                self.launch(lambda: func(*args, **kwargs))
                return args[0] if func._schema.returns else None
        return func(*args, **kwargs)

    def _stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    """As torch.cuda.Stream; `queue` holds (whether it has to wait, what to do)."""

    def __init__(self):
        self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()

    def wait_event(self, event: Event) -> None:
        number = event.recorded
        self.queue.append((lambda: event.done < number, lambda: None))


class Event:
    """As torch.cuda.Event."""

    def __init__(self, device: LateDevice):
        self.device, self.recorded, self.done = device, 0, 0

    def record(self) -> None:
        self.recorded += 1
        self.device.launch(partial(setattr, self, "done", self.recorded))

    def query(self) -> bool:
        return self.done == self.recorded


def _without_pins(make):
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


SLOTS, SLABS, HIDDEN, NODES, DEPTH = 5, 3, 2, 6, 4
REACH = DEPTH + 1
ROWS = PROMPT_ROWS + 3 * REACH
STOP = 7


@dataclass
class Plain:
    """One request as a reader sees it; rows: (position, token after it); None: not recorded."""

    number: int
    prompt: int
    position: int
    began: float
    begin: int
    rows: list[tuple[int, int]] | None = None
    sums: list[int] = field(default_factory=lambda: [0, 0, 0])
    ended: float | None = None


def states_of(number: torch.Tensor | int, position: torch.Tensor) -> list[torch.Tensor]:
    """States [n, HIDDEN] of four layers, of positions [n] of requests with these numbers."""
    value = 1000.0 * number + position
    return [torch.stack([value, torch.full_like(value, layer)], 1) for layer in range(4)]


class Engine:
    """An engine's steps on slabs, of a late device or in host memory; `seen` counts events."""

    def __init__(self, seed: int, rows: int = ROWS, device: LateDevice | None = None):
        self.draw, self.rows, self.device = random.Random(seed), rows, device
        self.slabs = Slabs(SLOTS + 1, HIDDEN, slabs=SLABS, rows=rows)
        if device is not None:
            copies = self.slabs.copies = slabs_module.PinnedSlabs(self.slabs.tensors)
            device.own([*self.slabs.tensors, *copies.rows, *copies.sums])
        self.running: dict[int, Plain] = {}
        self.waiting: list[Plain] = []
        self.left: deque[Plain] = deque()
        self.parent = torch.arange(NODES, dtype=torch.int32).repeat(SLOTS + 1, 1)  # chains
        self.origin = torch.ones(SLOTS + 1, NODES, dtype=torch.uint8)
        self.number, self.now, self.seen = 0, 0.0, Counter()

    def come(self) -> None:
        slot = next((slot for slot in range(SLOTS) if slot not in self.running), None)
        if slot is None:
            return
        if self.waiting and self.draw.random() < 0.5:
            old = self.waiting.pop()
            number, prompt = old.number, old.position + 1
            self.seen["resumed"] += 1
        else:
            self.number += 1
            number, prompt = self.number, self.draw.choice([1, 2, 9, 63, 64, 65, 66, 130])
        cached = self.draw.randrange(prompt) if self.draw.random() < 0.4 else 0
        self.seen["cached"] += cached > max(0, prompt - PROMPT_ROWS)
        begin = max(cached, prompt - PROMPT_ROWS)
        request = self.running[slot] = Plain(number, prompt, cached, self.now, begin)
        if self.draw.random() < 0.2:
            return  # it opted out
        free = bool(self.slabs.free)
        taken = self.slabs.begin(slot, f"{number}", prompt, cached, self.now, {STOP})
        assert taken == free
        self.seen["no slab"] += not taken
        request.rows = [] if taken else None

    def leave(self, slot: int) -> None:
        """Stop recording the request in a slot."""
        request = self.running[slot]
        assert self.slabs.end(slot, self.now) == (request.rows is not None)
        if request.rows is not None:
            self.left.append(replace(request, ended=self.now, sums=list(request.sums)))
            request.rows = None
        self.look()

    def look(self) -> None:
        """What left arrives, in its order."""
        for arrival in self.slabs.arrived():
            self.compare(self.left.popleft(), *arrival)
        if self.device is None:
            recorded = sum(each.rows is not None for each in self.running.values())
            assert not self.left and len(self.slabs.free) == SLABS - recorded
        self.seen["on the way"] += bool(self.left)

    def compare(self, request: Plain, record, finished, last) -> None:
        misses, steps, committed = request.sums
        assert last == (request.ended is not None)
        assert (finished is not None) == bool(last and steps)
        if finished is not None:
            assert (finished.misses, finished.steps, finished.tokens) == (misses, steps, committed)
            assert finished.seconds == request.ended - request.began
        labels = [position + 1 >= request.prompt for position, _ in request.rows]
        ends = [
            count
            for count, (label, (_, token)) in enumerate(zip(labels, request.rows), 1)
            if label and token == STOP
        ]
        count = ends[0] if ends else len(labels)
        self.seen["stopped"] += count < len(labels)
        rows, labels = request.rows[:count], labels[:count]
        if not any(labels):
            assert record is None
            return
        self.seen["records"] += 1
        positions, tokens = torch.tensor(rows).unbind(1)
        *low_to_high, own = states_of(request.number, positions)
        assert record.request == f"{request.number}"
        assert torch.equal(record.tokens, tokens) and record.labels.tolist() == labels
        assert torch.equal(record.states, torch.cat(low_to_high, 1))
        assert torch.equal(record.last, own)
        assert record.tau == (committed / steps if finished is not None else 0.0)

    def make_room(self, slots: list[int]) -> None:
        """Requests with a slab that may be full go on in another one, or are left."""
        crowded = self.slabs.crowded(slots, REACH)
        for slot in slots:
            request = self.running[slot]
            full = bool(request.rows) and len(request.rows) + REACH > self.rows
            # A late device is some steps behind.
            assert slot in crowded or not full
            assert self.device is not None or full == (slot in crowded)
            if slot not in crowded:
                continue
            self.seen["moved early"] += not full
            room = bool(self.slabs.free)
            assert self.slabs.move_on(slot) == room
            self.seen["moved" if room else "ran out"] += 1
            if room:
                self.left.append(replace(request, rows=request.rows, sums=list(request.sums)))
                request.rows, request.begin = [], max(request.position, request.begin)
                self.look()
            else:
                self.leave(slot)

    def step(self) -> None:
        """Some of the running requests, each a chunk of its prompt or what it accepted."""
        slots = [slot for slot in self.running if self.draw.random() < 0.8]
        if not slots:
            return
        self.now += 1.0
        self.slabs.copies.before_step()
        self.look()
        self.make_room(slots)
        rows, newest = [], []  # (request, token, position, number of the request)
        run, accepted = torch.zeros(2, len(slots), dtype=torch.int64)
        for index, slot in enumerate(slots):
            request = self.running[slot]
            left = request.prompt - request.position
            if left > 0:
                count = min(self.draw.choice([1, 5, 40, 200]), left)
            else:
                count = self.draw.randint(1, REACH)
                drafts = self.draw.randint(count - 1, NODES)
                run[index], accepted[index] = drafts, count - 1
                if request.rows is not None and drafts:
                    # A node of a chain has a child, or none.
                    more = (count - 1 < drafts, 1, count)
                    request.sums = [sum(pair) for pair in zip(request.sums, more)]
            for at in range(request.position, request.position + count):
                word = self.draw.choice([STOP, *range(20, 60)])
                rows.append((index, word, at, request.number))
                if request.rows is not None and at >= request.begin:
                    request.rows.append((at, word))
                    assert len(request.rows) <= self.rows, "a row found no place"
            newest.append(len(rows) - 1)
            request.position += count
        index, token, position, number = torch.tensor(rows).T.contiguous()
        *states, last = states_of(number, position)
        path = torch.arange(DEPTH + 1) * (torch.arange(DEPTH + 1) <= accepted[:, None])
        verdict = run, accepted.int(), path, None, self.origin, None
        of_rows = index, torch.arange(len(rows)), token, position, position, torch.tensor(newest)
        verified = VerifiedTrees(torch.tensor(slots), *verdict)
        step = StepToRecord(*of_rows, tuple(states), last, verified, self.parent)
        record = partial(record_step, self.slabs.tensors, step)
        record() if self.device is None else self.device.launch(record)


def serve(engine: Engine, length: int) -> Counter[str]:
    """Serve a random stream -> `seen`."""
    for _ in range(length):
        what = engine.draw.random()
        if what < 0.25:
            engine.come()
        elif what < 0.34 and engine.running:
            slot = engine.draw.choice(list(engine.running))
            engine.leave(slot)
            request = engine.running.pop(slot)
            if what < 0.30:  # preempted
                engine.waiting.append(request)
        else:
            engine.step()
        if engine.device is not None:
            # Now and then it does nothing for a while.
            engine.device.go_on(engine.draw.choice([0, 0, 5, 20, 60]))
    for slot in list(engine.running):
        engine.leave(slot)
        del engine.running[slot]
    if engine.device is not None:
        engine.device.finish()
        engine.look()
    assert len(engine.slabs.free) == SLABS and not engine.slabs.parts and not engine.left
    assert (engine.slabs.tensors.of_slot == -1).all()
    return engine.seen


def serve_late(seed: int, length: int) -> Counter[str]:
    """The same, of slabs on a device that is behind."""
    with pytest.MonkeyPatch.context() as patch:
        device = LateDevice(seed)
        device.install(patch, slabs_module)
        with device:
            return serve(Engine(seed, PROMPT_ROWS + 9 * REACH, device), length)


@pytest.mark.parametrize("late", [False, True], ids=["host", "late device"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), length=st.integers(1, 120))
def test_records_are_what_was_said(late, seed, length):
    """Late: of a device that is behind."""
    serve_late(seed, length) if late else serve(Engine(seed), length)


@pytest.mark.parametrize("late", [False, True], ids=["host", "late device"])
def test_everything_happens_in_it(late):
    """What the properties are worth: all that can happen did."""
    streams = (serve_late(n, 300) if late else serve(Engine(n), 300) for n in range(12))
    seen = sum(streams, Counter())  # without what never happened
    wanted = {"records", "moved", "ran out", "no slab", "resumed", "cached", "stopped"}
    assert seen.keys() == wanted | ({"on the way", "moved early"} if late else set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_record_has_the_dtype_of_the_target(dtype):
    slabs = Slabs(2, HIDDEN, dtype, slabs=1, rows=80)
    assert slabs.begin(0, "a", prompt=1, computed=0, now=0.0)
    assert not slabs.begin(1, "b", prompt=1, computed=0, now=0.0), "there is one slab"
    slabs.tensors.end[0] += 3
    assert slabs.end(0, now=1.0)
    ((record, finished, last),) = slabs.arrived()
    assert record.states.dtype == record.last.dtype == dtype and len(record.tokens) == 3
    assert last and finished is None, "nothing was drafted for it"
    assert not slabs.end(0, now=1.0) and slabs.begin(1, "b", prompt=1, computed=0, now=0.0)
