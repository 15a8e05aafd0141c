"""Waiting processes sleep on a CPU, so that the model has the cores.

A server is three processes: the API, the engine core, the worker. They hand each other one message
per step through shared memory, and vLLM's readers look for it without a pause for a second after
the last one, that is for as long as there is traffic. Beside a GPU that costs nothing; on a few
cores the engine core so takes a whole one from the worker that it waits for. Every message rings
anyway, and a reader that sleeps wakes in some 50 µs, of steps of tens of milliseconds.
"""

from __future__ import annotations

from typing import Any

import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm_specblock.engine.patches import patch

LOOK = 100
"""Milliseconds between two looks of a reader that nothing rings for. A ring is lost where a message
is sent before the reader's socket has connected, which vLLM's second of looking hides."""


def install() -> None:
    """Let readers sleep from the first look on, and every ring reach them; idempotent."""
    patch(SpinCondition, "__init__", _without_looking)
    patch(SpinCondition, "wait", _not_for_long)
    patch(SpinCondition, "notify", _never_dropped)


def _without_looking(original: Any) -> Any:
    def __init__(self: SpinCondition, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = -1.0  # at 0 a reader looks on while the clock has not ticked

    return __init__


def _not_for_long(original: Any) -> Any:
    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        original(self, LOOK if timeout_ms is None else min(timeout_ms, LOOK))

    return wait


def _never_dropped(original: Any) -> Any:
    def notify(self: SpinCondition) -> None:
        # vLLM's socket has room for one ring, and sees that the last has left only now and then:
        # of two within a millisecond the second was dropped, and an engine with drafts, which sends
        # its worker two messages a step, waited 50 ms in every one. Asking for events looks.
        self.local_notify_socket.getsockopt(zmq.EVENTS)
        original(self)

    return notify
