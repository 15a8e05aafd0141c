"""Orders of requests, and the figures over them."""

from __future__ import annotations

import pytest
from lib.policies import POLICIES, PaperWithoutBandit, make_policy
from lib.simulation import Served, Simulated
from lib.simulation_figures import figures, table, tau_of
from lib.streams import AWAY, HOME, STREAMS, make_stream, texts_needed

from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.train.config import TrainError


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_of_a_length_and_repeat_by_seed(name):
    stream = make_stream(name, 48, 3)
    assert len(stream) == 48
    assert stream == make_stream(name, 48, 3)
    home, away = texts_needed([stream])
    for domain, count in ((HOME, home), (AWAY, away)):
        assert {place.text for place in stream if place.domain == domain} == set(range(count))


def test_what_each_stream_is():
    of = {name: [place.domain for place in make_stream(name, 48, 0)] for name in STREAMS}
    assert of["switch"] == [HOME] * 8 + [AWAY] * 32 + [HOME] * 8
    assert sum(of["mixed"]) == 24 and of["mixed"] != [0, 1] * 24
    assert set(of["stationary"]) == {HOME}
    assert sum(of["gradual"][:16]) < 6 < 10 < sum(of["gradual"][-16:])
    assert of["passes"] == of["passes"][:6] * 8
    # New texts but for the passes.
    assert of["ordered"] == [HOME] * 24 + [AWAY] * 24
    for name in ("switch", "mixed", "ordered", "gradual"):
        found = make_stream(name, 48, 0)
        assert len({(place.domain, place.text) for place in found}) == 48
    assert texts_needed([make_stream("passes", 48, 0)]) == [3, 3]


def test_streams_of_four_domains():
    def of(name):
        return [place.domain for place in make_stream(name, 48, 0, 4)]

    assert of("ordered") == [0] * 12 + [1] * 12 + [2] * 12 + [3] * 12
    assert sorted(of("mixed")) == of("ordered") != of("mixed")
    assert of("switch")[8:40] == [1] * 11 + [2] * 11 + [3] * 10
    assert {1, 2, 3} <= set(of("gradual")[-24:])
    assert texts_needed([make_stream("mixed", 48, 0, 4)], 4) == [12] * 4
    phases = {place.phase for place in make_stream("ordered", 48, 0, 4)}
    assert phases == {"home", "away 1", "away 2", "away 3"}


def test_wrong_names_are_told():
    with pytest.raises(TrainError, match="no stream 'swich'"):
        make_stream("swich", 3, 0)
    with pytest.raises(TrainError, match="at least 1"):
        make_stream("switch", 0, 0)
    with pytest.raises(TrainError, match="no policy 'osd'"):
        make_policy("osd", 0)
    assert all(make_policy(name, 0) is not make_policy(name, 0) for name in POLICIES)


def served(taus, phase: str = "away", steps: int = 10, seconds: float = 2.0) -> list[Served]:
    return [Served(phase, steps, round(tau * steps), seconds, 0.5, 0) for tau in taus]


def test_tau_is_over_steps_not_requests():
    found = [Served("a", 10, 20, 1.0, 0.0, 0), Served("a", 30, 120, 1.0, 0.0, 0)]
    assert tau_of(found) == 140 / 40
    assert tau_of([]) is None


def test_figures_and_their_means_over_seeds():
    """`gain` is 7 / 6 and 8 / 7 times as fast as frozen of the same seed."""
    results = {}
    for seed, (policy, tau) in enumerate([("frozen", 2.0), ("gain", 3.0)] * 2):
        both = served([4.0] * 4, "home") + served([tau + (seed > 1)] * 4, "away")
        arms = {} if policy == "frozen" else {"heads": 2}
        found = Simulated(both, arms, 3, 1, [0], {"recorded": 8})
        results[f"switch, seed {seed // 2}: {policy}"] = figures(found)
    gain = results["switch, seed 0: gain"]
    assert gain["tau_by_phase"] == {"home": 4.0, "away": 3.0} and gain["tau_by_window"] == [3.5]
    assert gain["tokens_per_second"] == 280 / 16 and gain["training_share"] == 0.25
    cells = [cell.strip() for cell in table(results).splitlines()[-1].strip("|").split("|")]
    assert cells == [
        *("switch", "gain", "3.750", "home 4.00 (4.00), away 3.50 (3.50)"),
        *("18.8 (17.5 – 20.0)", "1.155", "25.0 %", "2.0, 0.0", "3.0", "1.0", "1.0"),
    ]


def test_without_a_bandit_every_update_is_of_all_weights_whatever_it_brought():
    bandit = PaperWithoutBandit()
    requests = [FinishedRequest(6.0, 10, tokens, 1.0) for tokens in (40, 50, 45, 40, 35)]
    found = [bandit.decide(request) for request in requests for _ in range(8)]
    assert [each.push for each in found if each.update] == [Action.FULL] * 3
    assert any(each.roll_back for each in found)
