"""Memory that two processes share and no folder names: it goes with the last of them."""

from __future__ import annotations

import mmap
import os
import threading
import zlib

import torch
from torch import Tensor

PAGE = 4096

_FENCE = threading.Lock()


class SharedMemory:
    """Anonymous memory under a file descriptor, mapped by whoever has the descriptor.

    It has no name in /dev/shm or elsewhere, so nothing is left behind however a process ends. New
    memory is all zeros, and takes room only where it was written.

    Args:
        size: bytes; None: map what `descriptor` has.
        descriptor: None: make new memory.

    Attributes:
        descriptor: to be passed on to a child; `os.close` it where it is not needed any more.
    """

    def __init__(self, size: int | None = None, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("specblock-adapt", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size or PAGE)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)
        self._bytes = memoryview(self._map)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._bytes)

    def numbers(self, offset: int, count: int) -> memoryview:
        """`count` int64 from byte `offset` on, a multiple of 8; each is read and written whole."""
        return self._bytes[offset : offset + 8 * count].cast("q")

    def part(self, offset: int, count: int) -> memoryview:
        """`count` bytes from byte `offset` on."""
        return self._bytes[offset : offset + count]


def tensor_in(part: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The memory's first bytes as a tensor; writing to it writes to the memory."""
    count = 1
    for length in shape:
        count *= length
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(part, dtype=dtype, count=count).view(shape)


def aligned(size: int, to: int = 64) -> int:
    """The next multiple of `to`: a cache line, where not told otherwise."""
    return -(-size // to) * to


def fence() -> None:
    """What was written before is seen by the other process before what is written after.

    A release and an acquire in a row are a full barrier, also on processors that reorder stores.
    """
    for _ in range(2):
        with _FENCE:
            pass


def checksum(part: memoryview) -> int:
    """CRC-32 of some bytes. Other threads run meanwhile."""
    return zlib.crc32(part)
