"""A device that does later what was queued on it, in any order that its streams and events allow.

Stands in for CUDA on a machine without: writes into its memory wait in a queue for each stream, and
the host sees what it would see of a GPU that is behind, or far ahead on one stream only.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_WRITES = {"aten::copy_", "aten::fill_", "aten::_foreach_copy_", "aten::zero_"}


class LateDevice(TorchDispatchMode):
    """A context in which writes into the device's memory are queued.

    Args:
        seed: of the order in which streams go on.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.draw, self.memory, self.streams = random.Random(seed), set(), []
        self.current = self._stream()

    def install(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Give modules its streams and events, and host memory in place of pinned memory."""
        device = self

        class DeviceEvent(Event):
            def __init__(self, enable_timing: bool = False):
                super().__init__(device)

        for module in modules:
            for name, made in (("Event", DeviceEvent), ("Stream", self._stream)):
                patch.setattr(module, name, made)
            patch.setattr(module, "stream", self._on)
        for name in ("zeros", "empty"):
            patch.setattr(torch, name, _without_pins(getattr(torch, name)))

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory of the device, or pinned memory that it writes to."""
        self.memory |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue something on the current stream."""
        self.current.queue.append(kernel)

    def go_on(self, most: int) -> None:
        """Do up to so many things, each the next of a stream that does not wait."""
        with _disable_current_modes(), torch.inference_mode():
            for _ in range(most):
                ready = [stream for stream in self.streams if stream.ready]
                if not ready:
                    return
                self.draw.choice(ready).queue.popleft()()

    def finish(self) -> None:
        """Do all that is queued."""
        while any(stream.queue for stream in self.streams):
            assert any(stream.ready for stream in self.streams), "streams wait for each other"
            self.go_on(1000)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in _WRITES:
            written = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            if any(tensor.untyped_storage()._cdata in self.memory for tensor in written):
                self.launch(lambda: func(*args, **kwargs))
                return args[0] if func._schema.returns else None
        return func(*args, **kwargs)

    def _stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    """What torch.cuda.Stream is to those who wait on it."""

    def __init__(self, device: LateDevice):
        self.device, self.queue = device, deque()

    @property
    def ready(self) -> bool:
        """Whether it has something to do that waits for nothing."""
        return bool(self.queue) and not getattr(self.queue[0], "waits", bool)()

    def wait_event(self, event: Event) -> None:
        number = event.recorded

        def go() -> None:
            pass

        go.waits = lambda: event.done < number
        self.queue.append(go)


class Event:
    """What torch.cuda.Event is to those who ask it; a millisecond lies between any two."""

    def __init__(self, device: LateDevice):
        self.device, self.recorded, self.done = device, 0, 0

    def record(self) -> None:
        self.recorded += 1
        number = self.recorded

        def go() -> None:
            self.done = number

        self.device.launch(go)

    def query(self) -> bool:
        return self.done == self.recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query()
        return 1.0


def _without_pins(make):
    def making(*args, pin_memory: bool = False, **kwargs):
        return make(*args, **kwargs)

    return making
