"""The table over several seeds."""

from __future__ import annotations

from adaptation import table


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
