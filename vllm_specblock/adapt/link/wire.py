"""Finished requests as bytes: a record's tensors and the policy's numbers in a slot of a ring.

A slot holds

    8 int64    what it has (bits), bytes of the id, W, columns of states and last, dtypes
    8 float64  the record's and the finished request's numbers
    256 bytes  the request's id, UTF-8
    tensors    states, last, tokens, labels, each from a cache line on
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.link.shared import aligned, tensor_in
from vllm_specblock.adapt.policy.interface import FinishedRequest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAME = 256
_HEAD = 8 * 8 + 8 * 8 + _NAME
_RECORD, _FINISHED = 1, 2


@dataclass(frozen=True)
class Finished:
    """What one message says.

    Attributes:
        record: None where the request was not recorded.
        request: None where the request goes on in another record.
    """

    record: Record | None
    request: FinishedRequest | None


def slot_size(rows: int, features: int, hidden: int, item: int) -> int:
    """Bytes that a record of so many rows takes.

    Args:
        rows: W.
        features: columns of the states, 3·Ht.
        hidden: Ht.
        item: bytes of a number in the states.
    """
    parts = (rows * features * item, rows * hidden * item, rows * 8, rows)
    return aligned(_HEAD) + sum(aligned(part) for part in parts)


def write(slot: memoryview, message: Finished) -> str | None:
    """Fill a slot.

    Returns:
        None, or why it was not: `empty`, `too long` for the slot, or of a `dtype` that is not sent.
    """
    if message.record is None and message.request is None:
        return "empty"
    record, request = message.record, message.request
    integers, floats = slot[:64].cast("q"), slot[64:128].cast("d")
    has = (_RECORD if record else 0) | (_FINISHED if request else 0)
    if record:
        if record.states.dtype not in DTYPES or record.last.dtype not in DTYPES:
            return "dtype"
        tensors = (record.states, record.last, record.tokens.long(), record.labels.bool())
        places = _places([(each.numel(), each.element_size()) for each in tensors])
        if places[-1] > len(slot):
            return "too long"
        for tensor, offset in zip(tensors, places):
            tensor_in(slot[offset:], tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        name = record.request.encode()
        if len(name) > _NAME:
            name = hashlib.sha256(name).hexdigest().encode()
        slot[128 : 128 + len(name)] = name
        kinds = DTYPES.index(record.states.dtype) + 8 * DTYPES.index(record.last.dtype)
        for place, value in enumerate(
            (len(name), *record.states.shape, record.last.shape[1], kinds), 1
        ):
            integers[place] = value
        floats[0], floats[1], floats[2] = record.misses, record.steps, record.committed
    if request:
        floats[3], floats[4] = request.misses, request.steps
        floats[5], floats[6] = request.tokens, request.seconds
    integers[0] = has
    return None


def pack(message: Finished) -> bytearray | None:
    """A message in bytes of its own; None where it cannot be sent."""
    record, size = message.record, aligned(_HEAD)
    if record:
        item = max(record.states.element_size(), record.last.element_size())
        rows, features = record.states.shape
        size = slot_size(rows, features, record.last.shape[1], item)
    packed = bytearray(size)
    return None if write(memoryview(packed), message) else packed


def read(slot: memoryview) -> Finished:
    """What `write` was given, in memory of its own.

    Raises:
        ValueError: the slot holds no message.
    """
    integers, floats = slot[:64].cast("q"), slot[64:128].cast("d")
    has, length, rows, features, hidden, kinds = integers[:6].tolist()
    if not 0 < has < 4:
        raise ValueError(f"A slot of the ring holds {has}, which is no finished request.")
    record = request = None
    if has & _RECORD:
        states_type, last_type = DTYPES[kinds % 8], DTYPES[kinds // 8]
        layout: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (states_type, (rows, features)),
            (last_type, (rows, hidden)),
            (torch.int64, (rows,)),
            (torch.bool, (rows,)),
        ]
        sizes = [(_count(shape), dtype.itemsize) for dtype, shape in layout]
        states, last, tokens, labels = (
            tensor_in(slot[offset:], dtype, shape).clone()
            for (dtype, shape), offset in zip(layout, _places(sizes))
        )
        name = bytes(slot[128 : 128 + length]).decode()
        numbers = floats[0], int(floats[1]), int(floats[2])
        record = Record(name, states, last, tokens, labels, *numbers)
    if has & _FINISHED:
        request = FinishedRequest(floats[3], int(floats[4]), int(floats[5]), floats[6])
    return Finished(record, request)


def _places(sizes: list[tuple[int, int]]) -> list[int]:
    """Where tensors of (numbers, bytes of a number) begin, and where the last of them ends."""
    places = [aligned(_HEAD)]
    for count, item in sizes:
        places.append(places[-1] + aligned(count * item))
    return places


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
