"""The controller on a simulated server: the short form of `benchmarks/controller.py`."""

from __future__ import annotations

import numpy as np
import pytest
from lib.controller_world import MACHINES, Phase, Trace, World, figures, simulate

SLOW, FAST = "CPU, SpecBlock", "GPU, n-gram"


class Fixed:
    """Verify every node above a survival; 1: plain decoding."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.steps = threshold, []

    def measured(self, verify, draft):
        assert min(verify.values()) > 0 and min(draft.values()) > 0

    def observe(self, step):
        self.steps.append(step)

    def budget(self, survival, requests, rows):
        assert len(survival) == requests == rows and (np.diff(survival) <= 0).all()
        return int((survival > self.threshold).sum())

    def drafts(self, requests):
        return self.threshold < 1


def world(name: str, *phases: Phase, **options) -> World:
    return World(MACHINES[name], Trace(phases, **options))


@pytest.mark.parametrize("name", MACHINES)
def test_a_fixed_policy_runs_as_it_was_computed(name):
    """Except for the first step, which has no trees, and estimates that are not yet calibrated."""
    found = world(name, Phase(600, 1))
    run = simulate(found, Fixed(0.0))
    choice = found.choices.index(f"{found.machine.nodes} nodes")
    np.testing.assert_allclose(run.tokens[1:], found.tokens[choice, 1:])
    np.testing.assert_allclose(run.seconds[1:], found.seconds[choice, 1:])
    plain = simulate(found, Fixed(1.0))
    np.testing.assert_allclose(plain.seconds, found.seconds[0])
    assert figures(found, plain)["first"] == pytest.approx(1)


def test_verdicts_agree_with_expected_tokens():
    found = world(FAST, Phase(4000, 4))
    policy = Fixed(0.1)
    run = simulate(found, policy)
    assert np.mean([step.tokens for step in policy.steps]) == pytest.approx(
        run.tokens.mean(), rel=0.03
    )


def test_the_text_gives_the_gain_that_was_asked_for():
    for gain in (1.02, 1.3):
        found = world(SLOW, Phase(600, 4), gain=gain)
        assert figures(found, simulate(found, Fixed(1.0)))["phases"][0]["gain"] == pytest.approx(
            gain, rel=0.01
        )


def test_plain_decoding_has_no_regret_where_it_is_best():
    found = world(SLOW, Phase(600, 4, "random"), Phase(600, 4))
    result = figures(found, simulate(found, Fixed(1.0)))
    assert result["loss"] == pytest.approx(0, abs=1e-6)
    assert result["regret"] > 0.05 and result["back"] == 600
