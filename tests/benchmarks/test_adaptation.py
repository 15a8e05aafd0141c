"""Tables of what was served."""

from __future__ import annotations

from dataclasses import replace

from adaptation_serving import LEARNERS, Serving


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
