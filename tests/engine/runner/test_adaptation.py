"""What the options of adaptation say to a trainer beside the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.adapting import Pair
from support.records import HIDDEN, small_drafter

from vllm_specblock.adapt.options import parse_adapt
from vllm_specblock.drafters.common.post_load import process_after_loading
from vllm_specblock.drafters.specblock.options import SpecBlockConfig
from vllm_specblock.engine.runner import adaptation
from vllm_specblock.engine.runner.adaptation import link_up, trainer_config
from vllm_specblock.engine.versions import drafter_versions


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
    config = trainer_config(parse_adapt(given, "specblock"), "drafter", "target", 1)
    assert (config.drafter, config.target, config.num_blocks) == ("drafter", "target", 1)
    assert {name: getattr(config, name) for name in said} == said


@pytest.mark.parametrize(
    ("given", "on_gpu", "made"),
    [
        ({}, False, "Versions"),
        ({}, True, "DeviceVersions"),
        ({"trainer": "folder"}, True, "DeviceVersions"),
        ({"policy": "watch", "out": "versions"}, True, "Versions"),
    ],
)
def test_a_gpu_prepares_versions_where_one_may_come(tmp_path, monkeypatch, given, on_gpu, made):
    pair = Pair.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adaptation.TrainerProcess, "start", lambda self: None)
    monkeypatch.setattr(drafter_versions, "Refresh", lambda model: ("for", model))
    model = process_after_loading(small_drafter(), None)
    weight = SimpleNamespace(is_cuda=on_gpu)
    drafter = SimpleNamespace(
        model=SimpleNamespace(config=model.config, norm=SimpleNamespace(weight=weight))
    )
    target = SimpleNamespace(
        model=str(pair.target), get_hidden_size=lambda: HIDDEN, dtype=torch.float32
    )
    found, _ = link_up(
        SimpleNamespace(model_config=target),
        SimpleNamespace(folder=str(pair.drafter), options=SpecBlockConfig(num_blocks=1)),
        parse_adapt(given, "specblock"),
        drafter,
    )
    assert type(found).__name__ == made
    assert found.trainer is None or found.trainer.config.num_blocks == 1
    refresh = ("for", drafter.model) if made == "DeviceVersions" else None
    assert getattr(found, "_refresh", None) == refresh
    if found.trainer is None:
        found.link.close()
