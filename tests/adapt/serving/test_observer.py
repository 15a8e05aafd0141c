"""What the options of adaptation say to a trainer beside the engine."""

from __future__ import annotations

import pytest

from vllm_specblock.adapt.options import parse_adapt
from vllm_specblock.adapt.serving import observer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, {"policy": "gain", "actions": "heads", "device": "cpu", "lr": None, "out": None}),
        ({"trainer": "cuda:1"}, {"device": "cuda:1", "actions": "all"}),
        (
            {"policy": "always", "every": 4, "lr": 1e-3},
            {"policy": "always", "every": 4, "lr": 1e-3},
        ),
        (
            {"rule": "paper", "memory": 64, "out": "x"},
            {"policy": "paper", "memory": 64, "out": "x"},
        ),
    ],
)
def test_a_trainer_is_told_what_the_options_say(given, said):
    options = parse_adapt(given, "specblock")
    config = observer.trainer_config(options, "drafter", "target", 1)
    assert (config.drafter, config.target, config.num_blocks) == ("drafter", "target", 1)
    assert {name: getattr(config, name) for name in said} == said
