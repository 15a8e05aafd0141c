"""A device that does later what was queued on it, in any order that its streams and events allow.

Stands in for CUDA on a machine without: writes into its memory wait in a queue for each stream, and
the host sees what it would see of a GPU that is behind, or far ahead on one stream only.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_WRITES = {"aten::copy_", "aten::fill_", "aten::_foreach_copy_", "aten::zero_"}


class LateDevice(TorchDispatchMode):
    """A context in which writes into the device's memory are queued."""

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
