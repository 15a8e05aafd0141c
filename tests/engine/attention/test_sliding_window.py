"""Targets with sliding-window layers: the example's weights, made to look back 48 tokens only."""

from __future__ import annotations

import json
import shutil

import pytest
from support.engines import TARGET, make_engine
from support.matrix import PROMPTS, Checker, params
from support.targets import edit_config

WINDOW = 48
LAYERS = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
KINDS = [["sliding_attention", "full_attention"][i % 2] for i in range(LAYERS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Every other layer has a window; the sweep of targets has models with windows alone."""
    folder = shutil.copytree(TARGET, tmp_path_factory.mktemp("target") / "target")
    edit_config(folder, sliding_window=WINDOW, layer_types=KINDS)
    return folder


def test_tokens_are_vllms_own(target, plain):
    heads = {"second_drafter": {"kind": "ngram"}}
    ours = make_engine({"num_speculative_tokens": 12, **heads}, model=str(target))
    windowed = make_engine(None, model=str(target))
    for temperature in (0.0, 1.0):
        requests = params(4, temperature=temperature, max_tokens=100)
        expected = windowed.generate(PROMPTS[:4], requests)
        assert expected != plain.generate(PROMPTS[:4], requests), "the window matters"
        check = Checker()
        check(ours, requests, expected, PROMPTS[:4])
        assert check.tokens == 400
    counts = ours.speculator.counters.as_dict()
    accepted = counts["accepted_nodes_1"] + counts["accepted_nodes_2"]
    assert accepted > 100, "hardly a tree was right: this tested little"


def test_a_cache_by_kinds_of_layers_is_one_sentence(target):
    with pytest.raises(ValueError, match="disable_hybrid_kv_cache_manager is False, but"):
        make_engine({}, model=str(target), disable_hybrid_kv_cache_manager=False)
