"""Weight updates of a drafter that serves on a GPU, of which no step waits for anything.

A thread makes new weights ready in pinned host memory; a stream beside the steps brings them to
the device; between two steps they are copied onto those in use, which takes as long as reading and
writing them does.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Generator, Mapping

import torch
from torch import Tensor

# By name: tests put a device in their place that does everything late.
from torch.cuda import Event, Stream, stream

from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import HEADS, Preparation, RefreshError, held

_ALIGNED = 256
"""Bytes at a multiple of which each tensor begins."""


class DeviceRefresh:
    """Room for one set of new weights on its way to a serving drafter.

    Takes the drafter's size once more on the device, and in pinned memory: to be made at load, so
    that vLLM's memory profile counts it.

    Args:
        drafter: as `post_load.process_after_loading` leaves it, on a GPU.

    Attributes:
        ready: the new weights are on the device and only wait for `release`.

    Raises:
        RefreshError: it was not made ready to serve.
    """

    def __init__(self, drafter: SpecBlockModel) -> None:
        self._preparation = Preparation(drafter, torch.device("cpu"))
        self._served = dict(held(drafter))
        # The heads come first: alone, they are one copy, too.
        names = sorted(self._served, key=lambda name: not name.startswith(HEADS))
        self._end, size = {}, 0
        for name in names:
            size += -size % _ALIGNED + self._served[name].nbytes
            self._end[name] = size
        device = drafter.norm.weight.device
        self._host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._staging = torch.empty(size, dtype=torch.uint8, device=device)
        # As integers of one size, tensors of all dtypes are copied in one launch.
        self._pairs = {
            name: (_numbers(served), _numbers(self._part(self._staging, name)))
            for name, served in self._served.items()
        }
        self._beside = Stream()
        self._there, self._began, self._written = (Event(enable_timing=True) for _ in range(3))
        self._going: Generator[None, None, float] | None = None
        self._new: list[str] = []
        self._error: RefreshError | None = None
        self.ready = self._held = False

    def start(self, tensors: Mapping[str, Tensor], hold: bool = False) -> None:
        """Begin to bring new weights in; an earlier update is dropped unless it is in use.

        Args:
            tensors: on the host, see `Preparation.prepare`; not to be changed any more.
            hold: do not copy them onto those in use before `release`.
        """
        self.ready, self._held = False, hold
        self._going = self._go(tensors)
        next(self._going)

    def release(self) -> None:
        """Let what is held serve from the next `turn` on."""
        self._held = False

    def turn(self) -> float | None:
        """Between two steps, on the stream on which they run: do what can be done without waiting.

        Returns:
            seconds that the device took to copy the weights onto those in use, once after it has;
            else None.

        Raises:
            RefreshError: the weights cannot serve; nothing was written.
        """
        if self._going is None:
            return None
        try:
            next(self._going)
        except StopIteration as done:
            self._going = None
            return float(done.value)
        except RefreshError:
            self._going = None
            raise
        return None

    def _go(self, tensors: Mapping[str, Tensor]) -> Generator[None, None, float]:
        """Goes on where `turn` is called next."""
        thread = threading.Thread(
            target=self._prepare, args=(tensors,), daemon=True, name="specblock-refresh"
        )
        thread.start()
        yield
        while thread.is_alive():
            yield
        if self._error is not None:
            raise self._error
        size = max(self._end[name] for name in self._new)
        with stream(self._beside):
            self._staging[:size].copy_(self._host[:size], non_blocking=True)
            self._there.record()
        while not self._there.query():
            yield
        while self._held:
            self.ready = True
            yield
        self.ready = False
        self._began.record()
        self._write()
        self._written.record()
        while not self._written.query():
            yield
        return 1e-3 * self._began.elapsed_time(self._written)

    def _prepare(self, tensors: Mapping[str, Tensor]) -> None:
        # Errors of this thread are reported by `turn`.
        self._error = RefreshError("The new weights could not be made ready.")
        try:
            new = self._preparation.prepare(tensors)
            for name, tensor in new.items():
                self._part(self._host, name).copy_(tensor)
            self._new, self._error = list(new), None
        except RefreshError as error:
            self._error = error

    @torch.inference_mode()
    def _write(self) -> None:
        groups: dict[torch.dtype, list[str]] = defaultdict(list)
        for name in self._new:
            groups[self._pairs[name][0].dtype].append(name)
        for names in groups.values():
            served = [self._pairs[name][0] for name in names]
            torch._foreach_copy_(served, [self._pairs[name][1] for name in names])

    def _part(self, memory: Tensor, name: str) -> Tensor:
        """A tensor's place in pinned memory or on the device."""
        served, end = self._served[name], self._end[name]
        return memory[end - served.nbytes : end].view(served.dtype).view(served.shape)


def _numbers(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 64-bit numbers; as bytes where it is none of these."""
    return tensor.view(-1).view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)
