"""Weights that are prepared over several turns serve whole, or not at all."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.records import small_drafter
from support.refreshed import assert_equal, served, values, weights

from vllm_specblock.adapt.serving.refresh import Refresh
from vllm_specblock.drafters.specblock.refresh import RefreshError


@pytest.fixture(params=["cpu", "gpu"])
def arriving(request, monkeypatch):
    """A drafter of seed 1, and its updates; as on a GPU: prepared in a thread."""
    drafter = served(small_drafter(1))
    update = Refresh(drafter)
    if request.param == "gpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
        update._pool = ThreadPoolExecutor(1)
    return drafter, update


def take(update: Refresh, **until) -> float | None:
    """Turns until the new weights serve, or are ready."""
    for _ in range(10_000):
        seconds = update.turn()
        if seconds is not None or (until and update.ready):
            return seconds
        time.sleep(1e-4)
    raise AssertionError("the weights never came")


def test_an_update_over_several_turns(arriving):
    drafter, update = arriving
    assert update.turn() is None, "there is none"
    update.start(weights(small_drafter(2)))
    assert take(update) > 0 and update.turn() is None
    assert_equal(drafter, values(served(small_drafter(2))))


def test_an_update_is_held_until_its_release_or_replaced(arriving):
    drafter, update = arriving
    before = values(drafter)
    for seed in (2, 3):
        update.start(weights(small_drafter(seed)), hold=True)
        assert take(update, ready=True) is None and update.ready
        assert_equal(drafter, before)
    update.release()
    assert take(update) > 0 and not update.ready
    assert_equal(drafter, values(served(small_drafter(3))))


def test_an_update_that_is_refused_leaves_room_for_the_next(arriving, monkeypatch):
    drafter, update = arriving
    before, broken = values(drafter), weights(small_drafter(2))
    broken["norm.weight"] *= float("nan")
    update.start(broken)
    with pytest.raises(RefreshError, match=r"norm\.weight holds NaN"):
        take(update)
    assert update.turn() is None
    assert_equal(drafter, before)
    if update._pool is not None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", None)
            update.start(weights(small_drafter(2)))
            with pytest.raises(RefreshError, match="could not be prepared"):
                take(update)
    update.start(weights(small_drafter(2)))
    assert take(update) is not None
    assert_equal(drafter, values(served(small_drafter(2))))
