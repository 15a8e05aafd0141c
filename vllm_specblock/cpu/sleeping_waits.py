"""Sleeping instead of polling in vLLM's message queues on a CPU.

API, engine core and worker exchange one message per step in shared memory. vLLM's readers poll for
a second after each, which takes a core from the worker. Messages also notify sleeping readers,
which wake up in some 50 µs.
"""

from __future__ import annotations

from typing import Any

import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm_specblock.engine.patches import Function, replaces

LOOK = 100
"""Milliseconds between two polls. A notification is lost if the reader's socket has not connected
yet, which vLLM's second of polling hides."""


def install() -> None:
    """Let readers sleep immediately, and deliver every notification. Idempotent."""

    @replaces(SpinCondition, "__init__")
    def without_polling(original: Function, self: SpinCondition, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        self.busy_loop_s = -1.0  # at 0 a reader polls until the clock ticks

    @replaces(SpinCondition, "wait")
    def wait(original: Function, self: SpinCondition, timeout_ms: int | None = None) -> None:
        original(self, LOOK if timeout_ms is None else min(timeout_ms, LOOK))

    @replaces(SpinCondition, "notify")
    def notify(original: Function, self: SpinCondition) -> None:
        # vLLM's socket holds one notification and notices late that it has left: of two within a
        # millisecond the second was dropped. Reading EVENTS updates it.
        self.local_notify_socket.getsockopt(zmq.EVENTS)
        original(self)
