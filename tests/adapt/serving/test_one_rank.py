"""Weights that are prepared over several turns serve whole, or not at all."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.rank_pair import Script, digest, digest_of, served_of

from vllm_specblock.adapt.serving.swaps import Swaps


@pytest.fixture(params=["cpu", "gpu"])
def turns(request, monkeypatch):
    """Turns of one rank until a version serves or is refused; as on a GPU: prepared in a thread."""
    model, link = served_of(0), Script({})
    swaps = Swaps(link, model)
    if request.param == "gpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
        swaps._pool = ThreadPoolExecutor(1)

    def until_settled(number: int) -> str:
        link.arrivals, before = {0: number}, len(link.taken) + len(link.refused)
        for _ in range(10_000):
            swaps.turn()
            if len(link.taken) + len(link.refused) > before:
                return digest(model)
            time.sleep(1e-4)
        raise AssertionError("the version never came")

    until_settled.link, until_settled.threaded = link, swaps._pool is not None
    return until_settled


def test_refused_weights_leave_what_serves_and_room_for_the_next(turns, monkeypatch):
    assert turns(2) == digest_of(2)
    assert turns(-3) == digest_of(2)
    if turns.threaded:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", None)  # a fault of another kind
            assert turns(4) == digest_of(2)
    assert turns(5) == digest_of(5)
    assert turns.link.refused == ([3, 4] if turns.threaded else [3])
    assert [number for _, number in turns.link.taken] == [2, 5]
