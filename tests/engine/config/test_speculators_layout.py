"""A checkpoint in the speculators layout that is served by itself: whose method counts."""

from __future__ import annotations

import json

import pytest
from vllm.engine import arg_utils

RAW = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {"model_type": "llama"},
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 5}],
        "verifier": {"name_or_path": "org/target"},
    },
}


@pytest.mark.parametrize(
    ("given", "method", "tokens"),
    [
        (None, "eagle3", 5),
        ({}, "eagle3", 5),
        ({"num_speculative_tokens": 2}, "eagle3", 2),
        ({"method": "ngram"}, "eagle3", 5),  # as vLLM does it
        # Of a tree the plugin knows how many nodes are good.
        ({"method": "specblock"}, "specblock", None),
        ({"method": "specblock", "num_speculative_tokens": 24}, "specblock", 24),
        ({"method": "specblock", "num-speculative-tokens": 7}, "specblock", 7),
    ],
)
def test_ours_is_kept_where_it_is_asked_for(given, method, tokens, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    model, tokenizer, found = arg_utils.maybe_override_with_speculators(
        model=str(tmp_path), tokenizer=None, trust_remote_code=False, vllm_speculative_config=given
    )
    assert model == tokenizer == "org/target"
    assert (found["model"], found["method"]) == (str(tmp_path), method)
    counts = [value for key, value in found.items() if key.startswith("num")]
    assert counts == ([] if tokens is None else [tokens])


def test_other_models_are_left_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    given = {"method": "specblock", "model": "org/drafter"}
    found = arg_utils.maybe_override_with_speculators(
        model=str(tmp_path), tokenizer=None, trust_remote_code=False, vllm_speculative_config=given
    )
    assert found == (str(tmp_path), None, given)
