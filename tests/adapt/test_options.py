"""Options of adaptation: defaults, and one sentence for each wrong one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_specblock.adapt.options import AdaptConfig, check_adapt, parse_adapt
from vllm_specblock.adapt.serving.observer import trainer_config
from vllm_specblock.config import OptionError


def refused(parts, call, *args) -> None:
    with pytest.raises(OptionError) as error:
        call(*args)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".") and sentence.count(". ") == 0, sentence
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("watch", ["'adapt' is 'watch'", "true, false or a dictionary"]),
        ({"polic": "watch"}, ["'adapt.polic' is not known", "under 'adapt'", "policy"]),
        ({"policy": "watch", "out": "versions"}, ["'watch' makes no versions"]),
        ({"trainer": "cuda"}, ["trainer is 'cuda'", "cuda:1"]),
        ({"trainer": "a/folder", "lr": 1e-4}, ["the folder 'a/folder'", "'lr'", "adapt run"]),
        ({"trainer": "a/folder", "policy": "watch"}, ["takes 'policy'", "drop the key"]),
    ],
    ids=str,
)
def test_wrong(given, parts):
    refused(parts, parse_adapt, given, "specblock")


@pytest.mark.parametrize("kind", ["eagle3", "ngram", "dflash"])
def test_other_heads(kind):
    assert parse_adapt(False, kind) is None
    refused([f"kind {kind!r}", "only specblock can adapt"], parse_adapt, True, kind)
    refused(["'second_drafter.adapt'"], parse_adapt, {}, kind, "second_drafter.")


@pytest.mark.parametrize(
    ("trainer", "serving", "parts"),
    [
        ("cuda:1", (0, 1), ["'cuda:1'", "a rank of vLLM serves on that GPU", "name another"]),
        ("cuda:2", (0, 1), ["PyTorch finds 2 GPUs here"]),
        ("cuda:0", (), None),
        ("cuda:0", (0,), None),  # one GPU for both
        ("cuda:1", (0,), None),
        ("cpu", (0, 1), None),
        ("a/folder", (0, 1), None),
    ],
)
def test_where_a_trainer_cannot_be(trainer, serving, parts, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    drafter = SimpleNamespace(adapt=parse_adapt({"trainer": trainer}, "specblock"))
    given = (
        SimpleNamespace(adapting=drafter, drafters=(drafter,)),
        SimpleNamespace(tensor_parallel_size=1),
        SimpleNamespace(model=str(tmp_path)),
        serving,
    )
    if parts is None:
        check_adapt(*given)
    else:
        refused(parts, check_adapt, *given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, {"policy": "gain", "actions": "heads", "device": "cpu", "lr": None, "out": None}),
        ({"trainer": "cuda:1"}, {"device": "cuda:1", "actions": "all"}),
        ({"policy": "always", "every": 4}, {"policy": "always", "every": 4}),
        ({"policy": "paper", "lr": 1e-3}, {"policy": "paper", "lr": 1e-3}),
        ({"memory": 64, "out": "x"}, {"memory": 64, "out": "x"}),
    ],
)
def test_a_trainer_is_told_what_the_options_say(given, said):
    options = parse_adapt(given, "specblock")
    assert AdaptConfig(**options.model_dump(mode="json")) == options
    config = trainer_config(options, "drafter", "target", 1)
    assert (config.drafter, config.target, config.num_blocks) == ("drafter", "target", 1)
    assert {name: getattr(config, name) for name in said} == said
