"""What the options of adaptation say to a trainer beside the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.adapting import Pair
from support.records import HIDDEN, small_drafter

from vllm_specblock.adapt.options import parse_adapt
from vllm_specblock.adapt.serving import observer
from vllm_specblock.drafters.specblock.host_refresh import HostRefresh
from vllm_specblock.drafters.specblock.options import SpecBlockConfig


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
        ({"policy": "watch", "out": "x"}, {"policy": "watch", "out": "x"}),
    ],
)
def test_a_trainer_is_told_what_the_options_say(given, said):
    options = parse_adapt(given, "specblock")
    config = observer.trainer_config(options, "drafter", "target", 1, torch.bfloat16)
    assert (config.drafter, config.target, config.num_blocks) == ("drafter", "target", 1)
    assert config.dtype == "bfloat16"
    assert {name: getattr(config, name) for name in said} == said


@pytest.mark.parametrize(
    ("given", "on_gpu", "made"),
    [
        ({}, False, "HostRefresh"),
        ({}, True, "room"),
        ({"trainer": "folder"}, True, "room"),
        ({"policy": "watch", "out": "versions"}, True, "HostRefresh"),
    ],
)
def test_room_for_a_version_is_made_where_one_may_come(tmp_path, monkeypatch, given, on_gpu, made):
    """At load, and on a GPU alone: there it takes the drafter's memory once more."""
    pair = Pair.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observer.TrainerProcess, "start", lambda self: None)
    monkeypatch.setattr(observer, "DeviceRefresh", type("room", (HostRefresh,), {}))
    norm = SimpleNamespace(weight=SimpleNamespace(is_cuda=on_gpu))
    model = SimpleNamespace(norm=norm, parameters=small_drafter().parameters)
    target = SimpleNamespace(
        model=str(pair.target), get_hidden_size=lambda: HIDDEN, dtype=torch.float32
    )
    swaps, link = observer.link_up(
        target,
        SimpleNamespace(folder=str(pair.drafter), options=SpecBlockConfig(num_blocks=1)),
        parse_adapt(given, "specblock"),
        SimpleNamespace(model=model),
    )
    assert type(swaps.refresh).__name__ == made
    assert swaps.trainer is None or swaps.trainer.config.num_blocks == 1
    link.close()
