"""A reader of vLLM's shared memory sleeps while it waits, and wakes for a message, rung or not."""

from __future__ import annotations

import threading
import time

import pytest

from vllm_specblock.cpu import sleeping_waits


@pytest.fixture
def queues():
    """Writer's and reader's end, the reader's patched as a server's on a CPU is."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    sleeping_waits.install()
    writer = MessageQueue(1, 1)
    reader: list[MessageQueue] = []
    thread = threading.Thread(
        target=lambda: reader.append(MessageQueue.create_from_handle(writer.export_handle(), 0))
    )
    thread.start()
    thread.join()
    ready = threading.Thread(target=reader[0].wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    return writer, reader[0]


def received(reader, seconds: float) -> tuple[object, float]:
    """What comes, and the processor's seconds that waiting for it took this thread."""
    before = time.thread_time()
    return reader.dequeue(timeout=seconds), time.thread_time() - before


def test_waiting_takes_no_core(queues):
    writer, reader = queues
    writer.enqueue("first")
    assert received(reader, 5)[0] == "first"  # traffic: vLLM's own readers look on from here
    later = threading.Timer(0.6, writer.enqueue, args=["second"])
    later.start()
    message, busy = received(reader, 5)
    assert message == "second" and busy < 0.1


def test_a_lost_ring_costs_a_look(queues, monkeypatch):
    writer, reader = queues
    writer.enqueue("first")
    assert received(reader, 5)[0] == "first"
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    threading.Timer(0.2, writer.enqueue, args=["second"]).start()
    start = time.monotonic()
    assert received(reader, 20)[0] == "second"
    assert time.monotonic() - start < 5


def test_of_two_messages_in_a_row_none_waits_for_a_look(queues, monkeypatch):
    """The second ring within a millisecond is one that vLLM's socket would drop."""
    monkeypatch.setattr(sleeping_waits, "LOOK", 1_000)
    writer, reader = queues
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: [found.append(reader.dequeue(timeout=20)) for _ in range(20)]
    )
    thread.start()
    start = time.monotonic()
    for number in range(20):
        time.sleep(0.0002 if number % 2 else 0.01)
        writer.enqueue(number)
        while len(found) <= number:
            time.sleep(0)
    thread.join()
    assert found == list(range(20)) and time.monotonic() - start < 1
