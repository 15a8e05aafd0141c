"""The table over several seeds, and the short form of the kills."""

from __future__ import annotations

from adaptation import table
from adaptation_kills import kill_all
from support.adapting import Pair


def results(tau: float, speed: float, returns: list[int]):
    def one(factor):
        return {
            "tau": tau * factor,
            "tokens_per_second": speed * factor,
            "training_share": 0.05,
            "swaps": 4,
            "returns": returns,
        }

    return {"switch": {"frozen": one(1.0), "gain": one(1.2)}}


def test_means_over_seeds_and_times_of_the_same_seed():
    rows = table([results(2.0, 80.0, []), results(3.0, 100.0, [0, 1])]).strip().splitlines()
    assert [cell.strip() for cell in rows[-1].strip("|").split("|")] == [
        *("switch", "gain", "3.000", "108.0 (96.0 – 120.0)", "1.200", "5.0 %", "4.0", "1.0"),
    ]


def test_kills_leave_nothing_behind(tmp_path):
    """A trainer and two engines; `benchmarks/adaptation.py kills` has thirty moments."""
    pair = Pair.make(tmp_path)
    found = kill_all(pair.drafter, pair.target, tmp_path / "out" / "versions", 1, 2, seed=1)
    assert found["moments"] == 3 and found["taken"] >= 3
    for name in ("not_finite", "torn", "orphans", "unusable", "left"):
        assert found[name] == 0, found
