"""Orders of requests, and the figures over them."""

from __future__ import annotations

from types import SimpleNamespace

from lib.simulation import Served, figures, table
from lib.streams import AWAY, HOME, STREAMS, texts_needed


def test_what_each_stream_is():
    of = {name: [place.domain for place in make(48, 0)] for name, make in STREAMS.items()}
    assert of["switch"] == [HOME] * 8 + [AWAY] * 32 + [HOME] * 8
    assert sum(of["mixed"]) == 24 and of["mixed"] != [0, 1] * 24
    assert set(of["stationary"]) == {HOME}
    assert sum(of["gradual"][:16]) < 6 < 10 < sum(of["gradual"][-16:])
    assert of["passes"] == of["passes"][:6] * 8
    assert of["ordered"] == [HOME] * 24 + [AWAY] * 24
    for name, make in STREAMS.items():
        found = make(48, 3)
        assert len(found) == 48 and found == make(48, 3)
        texts = {(place.domain, place.text) for place in found}
        assert len(texts) == (6 if name == "passes" else 48)  # all texts are new but for passes
        assert sum(texts_needed([found])) == len(texts)


def served(taus, phase: str = "away", steps: int = 10, seconds: float = 2.0) -> list[Served]:
    return [Served(phase, steps, round(tau * steps), seconds, 0.5, 0) for tau in taus]


def test_figures_and_their_means_over_seeds():
    """`gain` is 7 / 6 and 8 / 7 times as fast as frozen of the same seed."""
    results = {}
    for seed, (policy, tau) in enumerate([("frozen", 2.0), ("gain", 3.0)] * 2):
        both = served([4.0] * 4, "home") + served([tau + (seed > 1)] * 4, "away")
        arms = {} if policy == "frozen" else {"heads": 2}
        returns = SimpleNamespace(returns=[0])
        kept = {"requests": both, "updates": arms, "pool": returns, "books": {"recorded": 8}}
        found = SimpleNamespace(swaps=3, refused=1, **kept)
        results[f"switch, seed {seed // 2}: {policy}"] = figures(found)
    gain = results["switch, seed 0: gain"]
    assert gain["tau_by_phase"] == {"home": 4.0, "away": 3.0} and gain["tau_by_window"] == [3.5]
    assert gain["tokens_per_second"] == 280 / 16 and gain["training_share"] == 0.25
    assert "| 1.155 | 25.0 % |" in table(results).splitlines()[-1]
