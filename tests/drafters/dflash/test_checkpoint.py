"""DFlash checkpoints: the authors' layout loads, and there is one sentence for what does not."""

from __future__ import annotations

import pytest
import torch
from support.dflash import PUBLISHED, make_model, write
from support.validation import refusal

from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.dflash import checkpoint
from vllm_specblock.drafters.dflash.config import from_json
from vllm_specblock.drafters.specblock.config import CheckpointError


def test_the_published_layout_loads(tmp_path):
    model = make_model()
    folder = write(tmp_path / "drafter", model)
    assert kind_of(folder) == "dflash"
    config = checkpoint.read_config(folder)
    checkpoint.check_tensors(folder, config)
    loaded = checkpoint.load(folder)
    assert loaded.wants_head and loaded.config == config == model.config
    wanted, found = model.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_what_config_json_says():
    shape = from_json(PUBLISHED, "config.json")
    # Named by the last layer that was run, counted from 0.
    assert shape.target_layers(8) == (2, 4, 6)
    assert (shape.masks, shape.mask_token_id, shape.rope_theta) == (4, 60, 1e6)
    newer = {key: value for key, value in PUBLISHED.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert from_json(newer, "config.json").rope_theta == 5e5
    inside = PUBLISHED | {"dflash_config": PUBLISHED["dflash_config"] | {"block_size": 9}}
    assert from_json(inside, "config.json").masks == 8


def test_the_factor_of_yarn_is_in_the_norms(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
    raw = PUBLISHED | {"rope_scaling": scaling}
    model = make_model(raw)
    loaded = checkpoint.load(write(tmp_path / "drafter", model, raw))
    for mine, its in zip(loaded.layers, model.layers):
        for name in ("q_norm", "k_norm"):
            mine_, its_ = (getattr(each.self_attn, name).weight for each in (mine, its))
            assert torch.allclose(mine_, 1.5 * its_)
        assert torch.equal(mine.self_attn.q_proj.weight, its.self_attn.q_proj.weight)


OWN = PUBLISHED["dflash_config"]
WRONG = {
    "layout": ({"speculators_model_type": "dflash"}, "the layout of the speculators library"),
    "architecture": ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    "window": ({"layer_types": ["sliding_attention"] * 2}, "sliding-window attention"),
    "causal": ({"dflash_config": OWN | {"causal": True}}, "causal blocks"),
    "anchor": ({"dflash_config": OWN | {"sample_from_anchor": True}}, "read from their first"),
    "vocabulary": ({"draft_vocab_size": 32}, "a vocabulary of its own"),
    "width": ({"target_hidden_size": 64}, "a width that is not the target's"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "mask": ({"dflash_config": {"target_layer_ids": [1]}}, "lacks the key 'mask_token_id'"),
    "mask, far": ({"dflash_config": OWN | {"mask_token_id": 64}}, "the vocabulary ends at 63"),
    "layers": ({"dflash_config": {"mask_token_id": 3}}, "'dflash_config.target_layer_ids'"),
    "order": ({"dflash_config": OWN | {"target_layer_ids": [3, 1]}}, r"\[3, 1\].* ascending"),
    "block": ({"block_size": None}, "lacks the key 'block_size'"),
    "no block": ({"block_size": 1}, "'masks' = 0"),
    "heads": ({"num_key_value_heads": 3}, "must be a multiple of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_cannot_be_drafted_with(case):
    changes, says = WRONG[case]
    with pytest.raises(CheckpointError, match=says) as error:
        from_json(PUBLISHED | changes, "config.json")
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


def test_tensors_that_are_not_what_config_json_says(tmp_path):
    model = make_model()
    folder = write(tmp_path / "drafter", model, PUBLISHED | {"num_hidden_layers": 1})
    assert "has no use for" in refusal(checkpoint, folder)
    folder = write(tmp_path / "drafter", model, PUBLISHED | {"num_hidden_layers": 3})
    assert "lacks layers.2" in refusal(checkpoint, folder)
    folder = write(tmp_path / "drafter", model, PUBLISHED | {"intermediate_size": 40})
    assert "asks for [" in refusal(checkpoint, folder)
