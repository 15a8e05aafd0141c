"""What an update gained: shown by the requests after it, on the same texts for both versions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from lib.policies import Fixed
from support.adapting import Pair

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.learning.update import AdaptationConfig
from vllm_specblock.adapt.policy.interface import Action, Always
from vllm_specblock.drafters.specblock import checkpoint

EVERY = 4
CONFIG = AdaptationConfig(lr=3e-3, every=EVERY)


def adapting(pair: Pair) -> Adaptation:
    """Updates every four requests; `policy.told`: (action, gain, seconds, error) of each."""
    policy = Fixed(Action.FULL, EVERY)
    policy.told = []
    policy.reward = lambda *reward: policy.told.append(reward)
    drafter = checkpoint.load(pair.drafter)
    return Adaptation(drafter, pair.teacher, policy, CONFIG, seconds_lost=lambda *_: 0.25)


def test_a_gain_is_that_of_the_requests_after_the_update(pair):
    adaptation = adapting(pair)
    versions = [adaptation.training]
    for number in range(5 * EVERY):
        adaptation.finish(*pair.request(number))
        if (number + 1) % EVERY == 0:
            versions.append(adaptation.training)
    told, steps = adaptation.policy.told, adaptation.judge.steps
    assert len(told) == 4 and {each[0] for each in told} == {Action.FULL}
    assert {each[2] for each in told} == {0.25}
    for update, (_, gain, _, error) in enumerate(told, 1):
        before, after = versions[update - 1 : update + 1]
        records = [pair.record(number) for number in range(update * EVERY, (update + 1) * EVERY)]
        less, more = ([steps(each, record) for record in records] for each in (after, before))
        ratio = sum(more) / sum(less)
        assert gain == pytest.approx(ratio - 1, abs=1e-5)
        spread = stdev(b - ratio * a for a, b in zip(less, more))
        assert error == pytest.approx(spread / EVERY**0.5 / fmean(less), abs=1e-5) and error > 0
    assert sum(gain for _, gain, *_ in told) > 0.1


def test_a_version_that_old_texts_refused_serves_once_new_ones_want_it(pair, monkeypatch):
    """What it is judged by is of a domain that is gone: there it is worse."""
    adaptation = adapting(pair)
    monkeypatch.setattr(adaptation.judge, "is_better", lambda *_: False)
    serving, refused = [], []
    monkeypatch.setattr(adaptation, "count", lambda name, by: refused.append(name))
    for number in range(2 * EVERY):
        adaptation.finish(*pair.request(number))
        serving.append(adaptation.pool.current.number)
    assert refused.count("versions_refused_not_better") == 2
    # The first of them, as soon as the last of four new texts was held against it.
    assert serving == [0] * (2 * EVERY - 1) + [1]


def test_behind_an_alarm_training_begins_anew_from_what_serves(pair, monkeypatch):
    """What was learned of the texts before, and refused, is no start, nor are their moments."""
    adaptation = adapting(pair)
    monkeypatch.setattr(adaptation.judge, "is_better", lambda *_: False)
    monkeypatch.setattr(adaptation, "_look_again", lambda weighed: None)
    for number in range(EVERY):
        adaptation.finish(*pair.request(number))
    assert (adaptation.training.number, adaptation.pool.current.number) == (1, 0)
    assert adaptation.updater.optimizer.state
    monkeypatch.setattr(adaptation.falls, "add", lambda tau: True)
    adaptation.finish(*pair.request(EVERY))
    assert adaptation.training is adaptation.pool.origin
    assert not adaptation.updater.optimizer.state
    trained = dict(adaptation.updater.drafter.named_parameters())
    assert all(trained[name].equal(each) for name, each in adaptation.training.tensors.items())
    assert adaptation.number == 1, "its number is not given again"
    (told,) = adaptation.policy.told
    assert adaptation._weighed is None and told[2] == 0.25, "its price is known, its gain is moot"


def test_weights_that_are_not_finite_are_never_offered(pair, monkeypatch):
    """Training goes on from before."""
    adaptation, counts = adapting(pair), Counter()
    monkeypatch.setattr(adaptation, "count", lambda name, by: counts.update({name: by}))
    monkeypatch.setattr(adaptation.judge, "is_better", lambda *_: True)
    update = adaptation.updater.update

    def breaks(action, train_batches):
        report = update(action, train_batches)
        if not counts["versions_refused_weights"]:
            adaptation.updater.drafter.norm.weight.data[1] = float("nan")
        return report

    monkeypatch.setattr(adaptation.updater, "update", breaks)
    for number in range(3 * EVERY):
        adaptation.finish(*pair.request(number))
    assert counts["versions_refused_weights"] == 1
    assert counts["updates_full"] == 3 == counts["versions_offered"] + 1
    assert all(torch.isfinite(each).all() for each in adaptation.training.tensors.values())


def test_a_fall_of_tau_brings_the_last_good_version_back(pair, monkeypatch):
    adaptation = adapting(pair)
    monkeypatch.setattr(adaptation.judge, "is_better", lambda *_: True)
    for number in range(4 * EVERY):
        adaptation.finish(*pair.request(number))
    adaptation.pool.good = adaptation.pool.origin
    assert adaptation.pool.current.number > 0
    _, request = pair.request(100)
    for _ in range(2 * EVERY - 1):
        if adaptation.pool.current.number:
            adaptation.finish(None, replace(request, tokens=11))
    assert adaptation.pool.current is adaptation.pool.origin


def test_osd_learns_from_rejected_positions_of_new_records_alone(pair, monkeypatch):
    """Of new records each once, in their order; nothing is rehearsed."""
    drafter = checkpoint.load(pair.drafter)
    adaptation = Adaptation(drafter, pair.teacher, Always(every=EVERY), CONFIG)
    assert adaptation.updater.learner.rejected_only
    given = []
    train_batch = adaptation.teacher.train_batch
    monkeypatch.setattr(
        adaptation.teacher,
        "train_batch",
        lambda records, *more: given.append(records) or train_batch(records, *more),
    )
    for number in range(2 * EVERY):
        record, request = pair.request(number)
        adaptation.finish(replace(record, tau=1 + number % 3), request)
    names = [each.request for records in given for each in records]
    judged = {each.request for each in adaptation.book.recent.records}
    expected = [pair.record(number).request for number in range(2 * EVERY)]
    assert names == [name for name in expected if name not in judged]
    assert all(len(records) == 1 for records in given)
