"""Updates: what they change, that they learn, and that what is not finite changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from support.records import random_record, small_drafter, small_teacher

from vllm_specblock.adapt.learning.update import AdaptationConfig, Updater
from vllm_specblock.adapt.policy.actions import parameters
from vllm_specblock.adapt.policy.interface import Action

HEADS = {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"}


@pytest.fixture
def train_batch():
    records = [random_record(f"{n}", rows=20, seed=n) for n in range(4)]
    return small_teacher().train_batch(records, step=0, seed=1)


def state_of(updater: Updater):
    return copy.deepcopy((updater.drafter.state_dict(), updater.optimizer.state_dict()["state"]))


def changed(before, after) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_each_action_changes_its_own_parameters(train_batch):
    updater = Updater(small_drafter())
    before = state_of(updater)[0]
    updater.update(Action.HEADS, [train_batch])
    middle = state_of(updater)[0]
    assert changed(before, middle) == HEADS == set(parameters(updater.drafter, Action.HEADS))
    updater.update(Action.FULL, [train_batch])
    assert changed(middle, state_of(updater)[0]) == set(parameters(updater.drafter, Action.FULL))


def test_no_decay_and_three_times_the_rate_for_heads(train_batch):
    """Adam's first step is the rate for any gradient, and weights do not decay."""
    for action, rate in ((Action.FULL, 1e-3), (Action.HEADS, 3e-3)):
        updater = Updater(small_drafter(), AdaptationConfig(lr=1e-3))
        before = updater.drafter.lm_head.weight.detach().clone()
        updater.update(action, [train_batch])
        moved = (updater.drafter.lm_head.weight.detach() - before).abs()
        assert float(moved.max()) == pytest.approx(rate, rel=1e-2)


def test_a_batch_that_is_not_finite_changes_nothing(train_batch):
    updater = Updater(small_drafter())
    updater.update(Action.FULL, [train_batch])
    before = state_of(updater)
    hidden = train_batch.target_outputs.hidden.clone()
    hidden[1, 8, 3] = float("nan")
    poisoned = replace(
        train_batch, target_outputs=train_batch.target_outputs._replace(hidden=hidden)
    )
    for action in (Action.HEADS, Action.FULL):
        assert updater.update(action, [poisoned]) == []
    after = state_of(updater)
    assert not changed(before[0], after[0])
    assert str(before[1]) == str(after[1])  # moments and counts
    assert updater.steps == 1
    assert updater.update(Action.FULL, [poisoned, train_batch])


def test_a_gradient_that_is_not_finite_changes_nothing(train_batch):
    updater = Updater(small_drafter())
    updater.drafter.input_layer.fuse.weight.register_hook(lambda grad: grad * float("inf"))
    before = state_of(updater)[0]
    assert updater.update(Action.FULL, [train_batch]) == []
    assert not changed(before, state_of(updater)[0])
