"""The link of engine and trainer: what goes in comes out, and what is torn does not."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapting import Pair, staged
from support.records import HIDDEN, random_record, small_drafter

from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.link.layout import COUNTS, LinkSizes, shapes_of
from vllm_specblock.adapt.link.memory_link import EngineLink, TrainerLink
from vllm_specblock.adapt.link.shared import tensor_in
from vllm_specblock.adapt.policy.actions import held
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.train.config import TrainError

DRAFTER = small_drafter()
SHAPES = shapes_of(DRAFTER.config)
ORIGIN = Version(0, held(DRAFTER, Action.FULL))
REQUEST = FinishedRequest(1.5, 7, 19, 0.25)


def ends(**more) -> tuple[EngineLink, TrainerLink]:
    link = EngineLink(LinkSizes(SHAPES, HIDDEN, **{"slots": 4, "rows": 16, **more}))
    return link, TrainerLink(link.descriptor, SHAPES)


def version(number: int, action: Action, parent: Version = ORIGIN) -> Version:
    """Other weights for what the action trains."""
    drafter = small_drafter(seed=100 + number)
    return Version(number, held(drafter, action, parent.tensors), action, parent.number)


def equal(record, other) -> bool:
    tensors = ("states", "last", "tokens", "labels")
    pairs = [(getattr(record, name), getattr(other, name)) for name in tensors]
    return all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs) and (
        record.request,
        record.misses,
        record.steps,
        record.committed,
    ) == (other.request, other.misses, other.steps, other.committed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_requests_come_out_as_they_went_in(dtype):
    engine, trainer = ends(item=dtype.itemsize)
    assert trainer.next() is None
    for number in range(11):
        record = random_record(f"request {number} ü", rows=1 + number, prompt=0, seed=number)
        record = replace(record, states=record.states.to(dtype), last=record.last.to(dtype))
        assert engine.offer(record, REQUEST)
        found = trainer.next()
        assert equal(found.record, record) and found.request == REQUEST
    assert trainer.next() is None


def test_a_request_without_rows_and_rows_of_a_request_that_goes_on():
    engine, trainer = ends()
    record = random_record("long", rows=16)
    assert engine.offer(None, REQUEST) and engine.offer(record, None)
    first, second = trainer.next(), trainer.next()
    assert first.record is None and first.request == REQUEST
    assert equal(second.record, record) and second.request is None
    assert not engine.offer(None, None)


def test_a_full_ring_takes_nothing_and_never_waits():
    engine, trainer = ends()
    began = time.perf_counter()
    taken = [engine.offer(random_record(f"r{n}"), REQUEST) for n in range(7)]
    assert time.perf_counter() - began < 1
    assert taken == [True] * 4 + [False] * 3
    assert trainer.next().record.request == "r0"
    assert engine.offer(random_record("r7"), REQUEST)
    assert [trainer.next().record.request for _ in range(4)] == ["r1", "r2", "r3", "r7"]


def test_what_does_not_fit_is_not_taken():
    engine, trainer = ends()
    assert not engine.offer(random_record("r", rows=17), REQUEST)
    record = random_record("r")
    assert not engine.offer(replace(record, states=record.states.long()), REQUEST)
    assert trainer.next() is None
    name = "long " * 100
    assert engine.offer(replace(record, request=name), REQUEST)
    assert len(trainer.next().record.request) == 64  # still one for one request


def test_a_staged_version_arrives_once():
    engine, trainer = ends()
    trainer.staging.know(ORIGIN.tensors)
    assert staged(engine) is None
    heads = version(1, Action.HEADS)
    trainer.stage(heads)
    found = staged(engine)
    assert (found.number, found.parent, found.action) == (1, 0, Action.HEADS)
    assert set(found.tensors) == {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}
    assert all(torch.equal(found.tensors[name], heads.tensors[name]) for name in found.tensors)
    assert staged(engine) is None
    engine.took(found, seconds=0.25)
    assert (trainer.serves, trainer.swap_seconds(Action.HEADS)) == (1, 0.25)
    full = version(2, Action.FULL, heads)
    trainer.stage(full)
    found = staged(engine)
    assert found.action is Action.FULL
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in full.tensors.items())
    assert engine.counts["versions_offered"] == 2 and engine.counts["swaps"] == 1


def test_who_missed_a_trunk_gets_it_with_the_next_heads():
    engine, trainer = ends()
    trainer.staging.know(ORIGIN.tensors)
    full = version(1, Action.FULL)
    trainer.stage(full)
    heads = version(2, Action.HEADS, full)
    trainer.stage(heads)  # before the engine looked
    found = staged(engine)
    assert (found.number, found.action) == (2, Action.FULL)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in heads.tensors.items())
    # It did not take that one either, and the trunk is not its own: all again.
    trainer.stage(version(3, Action.HEADS, full))
    third = staged(engine)
    assert third.action is Action.FULL
    engine.took(third)
    trainer.stage(version(4, Action.HEADS, full))
    assert staged(engine).action is Action.HEADS
    trainer.stage(ORIGIN)
    back = staged(engine)
    assert (back.number, back.action) == (0, Action.FULL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_weights_are_rounded_to_the_dtype_that_serves(dtype):
    engine, trainer = ends(dtype=dtype)
    made = version(1, Action.FULL)
    trainer.stage(made)
    found = staged(engine).tensors
    assert all(torch.equal(found[name], made.tensors[name].to(dtype)) for name in found)


def test_a_torn_version_is_not_taken():
    engine, trainer = ends()
    trainer.stage(version(1, Action.FULL))
    head = trainer.staging._head
    head[0] += 1  # whoever wrote it died
    assert staged(engine) is None and engine.counts["versions_refused_checksum"] == 0
    after = TrainerLink(engine.descriptor, SHAPES)
    assert after.staging.recover(ORIGIN.tensors) is None
    after.stage(version(2, Action.FULL))
    assert staged(engine).number == 2


def test_a_corrupt_version_is_refused_and_counted():
    engine, trainer = ends()
    trainer.stage(version(1, Action.FULL))
    part = trainer.staging._parts["input_layer.fuse.weight"]
    part[40] ^= 1
    assert staged(engine) is None and staged(engine) is None
    assert engine.counts["versions_refused_checksum"] == 1
    assert TrainerLink(engine.descriptor, SHAPES).staging.recover(ORIGIN.tensors) is None
    trainer.stage(version(2, Action.FULL))
    assert staged(engine).number == 2


def test_nan_is_refused_and_counted():
    engine, trainer = ends()
    bad = version(1, Action.FULL)
    bad.tensors["norm.weight"][3] = float("nan")
    trainer.stage(bad)
    assert staged(engine) is None
    assert engine.counts["versions_refused_not_finite"] == 1
    trainer.stage(version(2, Action.FULL))
    found = staged(engine)
    engine.refuse(found)
    assert engine.counts["versions_refused_not_finite"] == 2


def test_a_trainer_after_another_recovers_what_was_staged():
    engine, trainer = ends()
    trainer.staging.know(ORIGIN.tensors)
    made = version(7, Action.HEADS)
    trainer.stage(made)
    engine.took(staged(engine))
    after = TrainerLink(engine.descriptor, SHAPES)
    found = after.staging.recover(ORIGIN.tensors)
    assert (found.number, found.parent, found.action) == (7, 0, Action.HEADS)
    assert all(torch.equal(found.tensors[name], made.tensors[name]) for name in found.tensors)
    after.stage(version(8, Action.HEADS, found))
    assert staged(engine).action is Action.HEADS


def test_a_writer_killed_at_any_moment_leaves_no_version_that_is_not_whole():
    """A child that stages as fast as it can; every version is of one number throughout."""
    names = list(SHAPES)

    def filled(number: int) -> Version:
        return Version(number, {name: torch.full(SHAPES[name], float(number)) for name in names})

    draw, seen = random.Random(5), 0
    for _ in range(4):
        engine, trainer = ends()
        child = os.fork()
        if not child:
            try:
                for number in range(1, 1 << 30):
                    trainer.stage(filled(number))
                    time.sleep(0.003 * (number % 3 == 0))
            finally:
                os._exit(1)
        until = time.monotonic() + 0.05 + 0.2 * draw.random()
        while time.monotonic() < until:
            seen += _whole(staged(engine))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen += _whole(staged(engine))
        after = TrainerLink(engine.descriptor, SHAPES)
        after.stage(filled(1 << 20))
        assert staged(engine).number == 1 << 20
        assert engine.counts["versions_refused_checksum"] == 0
    assert seen > 8


def _whole(found) -> int:
    if found is None:
        return 0
    values = {float(value) for tensor in found.tensors.values() for value in tensor.unique()}
    assert values == {float(found.number)}
    return 1


def test_beats_and_the_end():
    engine, trainer = ends()
    assert 0 <= engine.silence < 5 and 0 <= trainer.silence < 5
    assert EngineLink(LinkSizes(SHAPES, HIDDEN, slots=1)).silence == float("inf")
    assert not trainer.closed
    engine.close()
    assert trainer.closed


def test_another_drafter_is_refused(tmp_path: Path):
    engine, _ = ends()
    with pytest.raises(TrainError, match="the same drafter"):
        TrainerLink(engine.descriptor, Pair.make(tmp_path).sizes.shapes)


def test_the_memory_has_no_name():
    engine, _ = ends()
    assert "memfd" in os.readlink(f"/proc/self/fd/{engine.descriptor}")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    assert any("specblock-adapt (deleted)" in line for line in mapped)
    assert set(engine.counts) == set(COUNTS)
    assert tensor_in(memoryview(bytearray(8)), torch.float32, (0, 3)).shape == (0, 3)
