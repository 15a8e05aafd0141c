"""The policies without a bandit."""

from __future__ import annotations

import pytest

from vllm_specblock.adapt.policy.interface import (
    Action,
    Always,
    FinishedRequest,
)

REQUEST = FinishedRequest(misses=3.0, steps=12, tokens=30, seconds=0.4)


def updates(policy, count: int) -> list[int]:
    return [number for number in range(1, count + 1) if policy.decide(REQUEST).update]


def test_always_updates_everything_every_eight_requests_without_a_gate():
    assert updates(Always(), 25) == [8, 16, 24]
    assert Always().decide(REQUEST).push is Action.FULL
    assert not Always().gated
    assert updates(Always(Action.HEADS, 3), 10) == [3, 6, 9]


def test_rates_of_a_request():
    assert (REQUEST.miss_rate, REQUEST.tau) == (0.25, 2.5)
    with pytest.raises(ValueError, match="has a step"):
        FinishedRequest(0.0, 0, 0, 1.0)
