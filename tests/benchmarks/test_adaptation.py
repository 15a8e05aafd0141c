"""Tables of what was served."""

from __future__ import annotations

from dataclasses import replace

from adaptation_serving import LEARNERS, UPDATES, Serving
from adaptation_serving import tables as tables_of_served

from vllm_specblock.engine.metrics.acceptance import STEPS, TOKENS


def window(accepted: int, updates: int = 0, different: int = 0):
    counters = {STEPS: 10, TOKENS: 10 + accepted, f"{UPDATES}full": updates}
    said = {"wall": 2.0, "cpu": 3.0, "tokens": 10 + accepted, "different": different}
    return said | {"counters": counters}


def test_what_was_served_is_told_in_parts():
    """The first window warms up; then home, and each other domain in four parts."""
    domains = (("maths", 8), ("code", 8))
    serving = Serving(6, domains, window=2, batch=2, nodes=12, new_tokens=8, dtype="float32")
    frozen = [window(20), window(10), window(10), *(window(5) for _ in range(8))]
    learned = [window(0), window(10), window(10, 1)]
    learned += [window(5 * n, 1, n == 2) for n in range(4)] + [window(10)] * 4
    said = tables_of_served({"frozen": frozen, "gain": learned}, serving)
    cells = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in said.strip().splitlines()
    ]
    assert cells[2] == ["home", "2.00 (+0 %), 1.00 ×", "2.00 (+0 %), 1.00 ×"]
    assert [row[0] for row in cells[3:7]] == [f"maths {part}/4" for part in range(1, 5)]
    assert [row[2] for row in cells[3:7]] == [
        *("1.00 (-33 %), 0.67 ×", "1.50 (+0 %), 1.00 ×"),
        *("2.00 (+33 %), 1.33 ×", "2.50 (+67 %), 1.67 ×"),
    ]
    assert cells[7][::2] == ["code 1/4", "2.00 (+33 %), 1.33 ×"]
    assert cells[-1] == ["gain", "33", "0, 5", "0", "0", "1"]


def test_a_single_window_of_home_is_told_of_though_it_warms_up():
    serving = Serving(
        2, (("maths", 8),), window=2, batch=2, nodes=12, new_tokens=8, dtype="float32"
    )
    said = tables_of_served({"frozen": [window(10)] * 5}, serving)
    assert "| home | 2.00 (+0 %), 1.00 × |" in said


def test_who_learns_is_asked_for_in_the_words_of_the_options(tmp_path):
    from vllm_specblock.adapt.options import parse_adapt

    serving = Serving(6, (("away", 8),), window=2, batch=2, nodes=12, new_tokens=8, dtype="float32")
    for name, adapt in LEARNERS.items():
        asked = serving.arguments(tmp_path, tmp_path, name)["speculative_config"].get("adapt")
        assert asked == adapt
        assert adapt is None or parse_adapt(adapt, "specblock", "") is not None
        quick = replace(serving, lr=0.001).arguments(tmp_path, tmp_path, name)
        asked = quick["speculative_config"].get("adapt")
        assert asked == (None if adapt is None else adapt | {"lr": 0.001})
