"""A checkpoint in the speculators layout that is served by itself: whose method counts."""

from __future__ import annotations

import json

import pytest
from support.eagle3 import speculators_json
from vllm.engine import arg_utils


def overridden(folder, raw, given):
    (folder / "config.json").write_text(json.dumps(raw))
    return arg_utils.maybe_override_with_speculators(
        model=str(folder), tokenizer=None, trust_remote_code=False, vllm_speculative_config=given
    )


@pytest.mark.parametrize(
    ("given", "method", "tokens"),
    [
        (None, "eagle3", 3),
        ({"method": "ngram", "num_speculative_tokens": 2}, "eagle3", 2),  # as vLLM does it
        # Of a tree the plugin knows how many nodes are good.
        ({"method": "specblock"}, "specblock", None),
        ({"method": "specblock", "num_speculative_tokens": 24}, "specblock", 24),
        ({"method": "specblock", "num-speculative-tokens": 7}, "specblock", 7),
    ],
)
def test_ours_is_kept_where_it_is_asked_for(given, method, tokens, tmp_path):
    model, tokenizer, found = overridden(tmp_path, speculators_json({"model_type": "llama"}), given)
    assert model == tokenizer == "org/target"
    assert (found["model"], found["method"]) == (str(tmp_path), method)
    counts = [value for key, value in found.items() if key.startswith("num")]
    assert counts == ([] if tokens is None else [tokens])


def test_other_models_are_left_alone(tmp_path):
    given = {"method": "specblock", "model": "org/drafter"}
    found = overridden(tmp_path, {"model_type": "llama"}, given)
    assert found == (str(tmp_path), None, given)
