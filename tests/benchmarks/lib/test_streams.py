"""Orders of requests, and the figures over them."""

from __future__ import annotations

import pytest
from lib.policies import POLICIES, PaperWithoutBandit, make_policy
from lib.simulation import Served, Simulated
from lib.simulation_figures import draw, figures, markdown, requests_to_adapt, tau_of, windows
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
    assert windows(found, 1) == [2.0, 4.0]
    assert tau_of([]) is None


def test_requests_to_adapt_by_hand():
    frozen = served([2.0] * 64)
    mine = served([2.0] * 16 + [2.5] * 16 + [2.8] * 8 + [3.0] * 24)
    # Nine tenths of the final gain of 1.0 are reached by the sixth eight.
    assert requests_to_adapt(mine, frozen) == 48
    assert requests_to_adapt(served([1.9] * 64), frozen) is None


def simulated(taus) -> Simulated:
    both = served(taus[:4], "home") + served(taus[4:], "away")
    return Simulated(both, {"heads": 2}, 3, 1, [0], {"recorded": 8}, [3.5, 2.5])


def test_figures_table_and_plot(tmp_path):
    frozen = simulated([4.0] * 4 + [2.0] * 4)
    found = {
        "frozen": figures(frozen, frozen, 4),
        "gain": figures(simulated([4.0] * 4 + [3.0] * 4), frozen, 4),
    }
    assert found["gain"]["tau_by_phase"] == {"home": 4.0, "away": 3.0}
    assert found["gain"]["tau_by_window"] == [4.0, 3.0]
    assert found["gain"]["tokens_per_second"] == 280 / 16
    assert found["gain"]["training_share"] == 0.25
    assert found["gain"]["requests_to_adapt"] == {"home": None, "away": 4}
    lines = markdown({"switch": found}).splitlines()
    assert lines[0] == "**switch**, 8 requests"
    assert lines[-1].split(" | ") == [
        *("| gain", "4.00 (4.00)", "3.00 (3.00)", "17.5", "25.0 %", "2, 0", "3", "1", "1"),
        *("3.50", "2.50 |"),
    ]
    pytest.importorskip("matplotlib")
    assert draw(found, "switch stream", tmp_path / "tau.png")
    assert (tmp_path / "tau.png").stat().st_size > 5000


def test_without_a_bandit_every_update_is_of_all_weights_whatever_it_brought():
    bandit = PaperWithoutBandit()
    requests = [FinishedRequest(6.0, 10, tokens, 1.0) for tokens in (40, 50, 45, 40, 35)]
    found = [bandit.decide(request) for request in requests for _ in range(8)]
    assert [each.push for each in found if each.update] == [Action.FULL] * 3
    assert any(each.roll_back for each in found)
