"""Slices between steps: their order, what they may take, and what is left when work fails."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from vllm_specblock.adapt.serving.slices import LONGEST, Slices


def free(work, **named) -> Slices:
    """Slices of work that takes no time, so that serving can spare each of them."""
    return Slices(work, share=1.0, clock=lambda: 0.0, **named)


class World:
    """A clock, and work of three pieces that says what ran where."""

    def __init__(self, piece: float = 0.0, share: float = 0.5) -> None:
        self.now, self.piece = 0.0, piece
        self.said: list[str] = []
        self.slices = Slices(self.work, share, clock=lambda: self.now)

    def work(self) -> bool:
        for number in range(3):
            self.now += self.piece
            self.said.append(f"piece {number} in {threading.current_thread().name}")
            self.slices.pause()
        return True

    def step(self, seconds: float = 1.0) -> bool:
        self.now += seconds
        found = self.slices.grant()
        self.said.append("step")
        return found


def test_pieces_and_steps_take_turns():
    world = World()
    for _ in range(4):
        assert world.step()
    pieces = [each for each in world.said if each != "step"]
    assert world.said[1::2] == ["step"] * 4 and world.said[0::2] == pieces
    assert [each.split()[1] for each in pieces] == ["0", "1", "2", "0"]
    assert {each.split()[-1] for each in pieces} == {"specblock-slices"}
    world.slices.close()
    assert not world.step() and world.said[-1] == "step"


@pytest.mark.parametrize("piece", [0.01, 0.4, 3.0])
def test_pieces_take_their_share(piece):
    world, share = World(piece, share=0.1), 0.1
    before = world.now
    pieces = sum(world.step(0.05) for _ in range(4000))
    took = world.slices.seconds
    assert took == pytest.approx(pieces * piece) and pieces > 0
    assert took <= share * (world.now - before) + piece
    if piece >= 0.4:  # more work than there is time for
        assert took == pytest.approx(share * 4000 * 0.05, abs=piece + share * LONGEST)
    world.slices.close()


def test_an_idle_engine_saves_up_no_more_than_a_second():
    world = World(0.02, share=0.1)
    world.step(0.05)
    world.step(3600.0)
    assert world.slices._account <= 0.1 * LONGEST


@pytest.mark.parametrize("error", [RuntimeError("no memory"), SystemExit(3), KeyboardInterrupt()])
def test_work_that_fails_ends_and_serving_goes_on(error, caplog):
    def work() -> bool:
        slices.pause()
        raise error

    slices = free(work)
    assert slices.grant() and slices.error is None
    slices.grant()
    assert slices.error is error and "serves on" in caplog.text
    step = threading.Thread(target=slices.grant, daemon=True)
    step.start()
    step.join(10.0)
    assert not step.is_alive()
    slices.close()


def test_its_thread_works_inside_what_it_is_given():
    said = []

    @contextmanager
    def inside():
        said.append("in")
        try:
            yield
        finally:
            said.append("out")

    slices = free(lambda: bool(said.append("work")), inside=inside)
    slices.grant()
    slices.close()
    assert said == ["in", "work", "out"]
