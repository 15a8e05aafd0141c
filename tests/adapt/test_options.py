"""Options of adaptation: defaults, and one sentence for each wrong one."""

from __future__ import annotations

import pytest

from vllm_specblock.adapt.options import AdaptConfig, parse_adapt
from vllm_specblock.config import OptionError


def refused(given, *parts: str, kind: str = "specblock", where: str = "") -> None:
    with pytest.raises(OptionError) as error:
        parse_adapt(given, kind, where)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".") and sentence.count(". ") == 0, sentence
    for part in parts:
        assert part in sentence, sentence


def test_defaults():
    assert parse_adapt(False, "specblock") is None
    options = parse_adapt(True, "specblock")
    assert options == AdaptConfig() == parse_adapt({}, "specblock")
    assert (options.policy, options.rule, options.trainer) == ("bandit", "gain", "cpu")
    assert (options.every, options.requests, options.memory) == (8, "all", 512)
    assert options.actions is options.lr is options.out is None and options.largest == "heads"


def test_given():
    options = parse_adapt({"trainer": "cuda:1", "memory": 64, "lr": 1e-4}, "specblock")
    assert options.largest == "all" and options.memory == 64 and options.lr == 1e-4
    assert AdaptConfig(**options.model_dump(mode="json")) == options
    assert parse_adapt({"trainer": "cuda:1", "actions": "heads"}, "specblock").largest == "heads"
    assert parse_adapt({"policy": "always", "out": "x"}, "specblock").out == "x"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("watch", ["'adapt' is 'watch'", "true, false or a dictionary"]),
        (None, ["'adapt' is None"]),
        ({"polic": "watch"}, ["'adapt.polic' is not known", "under 'adapt'", "policy"]),
        ({"policy": "greedy"}, ["'adapt.policy' is 'greedy'", "'watch'"]),
        ({"policy": "watch", "rule": "paper"}, ["rule 'paper'", "policy is 'watch'"]),
        ({"trainer": "cuda"}, ["trainer is 'cuda'", "cuda:1"]),
        ({"trainer": ""}, ["trainer is empty"]),
        ({"trainer": "engine", "actions": "all"}, ["'engine'", "heads only"]),
        ({"actions": "full"}, ["'adapt.actions' is 'full'", "'all'"]),
        ({"lr": 0}, ["'adapt.lr' is 0", "greater than 0"]),
        ({"lr": float("inf")}, ["'adapt.lr' is inf"]),
        ({"every": 0}, ["'adapt.every' is 0"]),
        ({"every": 2.5}, ["'adapt.every' is 2.5"]),
        ({"memory": -1}, ["'adapt.memory' is -1"]),
        ({"memory": "512"}, ["'adapt.memory' is '512'"]),
        ({"requests": "some"}, ["'adapt.requests' is 'some'", "'marked'"]),
        ({"out": 3}, ["'adapt.out' is 3"]),
    ],
    ids=str,
)
def test_wrong(given, parts):
    refused(given, *parts)


@pytest.mark.parametrize("kind", ["eagle3", "ngram", "medusa"])
def test_other_heads(kind):
    assert parse_adapt(False, kind) is None
    refused(True, f"kind {kind!r}", "only SpecBlock drafters", "drop the key", kind=kind)
    refused({}, "'second_head.adapt'", kind=kind, where="second_head.")
