"""JetSpec checkpoints: DFlash's layout with one more key, which decides what a checkpoint is."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch
from support.dflash import JETSPEC, PUBLISHED, make_model, write
from support.validation import refusal

from vllm_specblock.drafters.common.checkpoint_files import wanted_shapes
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.dflash import checkpoint as of_dflash
from vllm_specblock.drafters.dflash.config import from_json, is_causal
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.jetspec import checkpoint
from vllm_specblock.drafters.specblock.config import CheckpointError

OWN = JETSPEC["dflash_config"]


def test_the_published_layout_loads(tmp_path):
    model = make_model(JETSPEC)
    folder = write(tmp_path / "drafter", model, JETSPEC)
    assert kind_of(folder) == "jetspec"
    config = checkpoint.read_config(folder)
    assert (config.masks, config.mask_token_id, config.layer_ids) == (6, 60, (2, 4, 6))
    checkpoint.check_tensors(folder, config)
    loaded = checkpoint.load(folder)
    assert loaded.wants_head and loaded.config == config == model.config
    wanted, found = model.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_published_checkpoint_by_its_numbers():
    """That for Qwen3-8B has 1,048,626,432 numbers; its sizes are those of its target's layers."""
    raw = JETSPEC | {
        "block_size": 16,
        "dflash_config": {
            "causal_head": True,
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
        },
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 36,
        "vocab_size": 151936,
        "layer_types": ["full_attention"] * 5,
    }
    config = from_json(raw, "config.json", causal=True)
    shapes = wanted_shapes(partial(DFlashModel, config))
    assert sum(map(prod, shapes.values())) == 1_048_626_432
    assert tuple(shapes["fc.weight"]) == (4096, 5 * 4096) and config.masks == 15


SAYING_SO = {
    "authors": {"dflash_config": OWN},
    "vllm": {"dflash_config": PUBLISHED["dflash_config"] | {"causal": True}},
    "both": {"dflash_config": OWN | {"causal": True}},
    "flat": {"dflash_config": PUBLISHED["dflash_config"], "is_causal": True},
}


@pytest.mark.parametrize("how", SAYING_SO)
def test_where_a_config_says_that_blocks_are_causal(how):
    raw = JETSPEC | SAYING_SO[how]
    assert is_causal(raw) and from_json(raw, "config.json", causal=True).masks == 6


def test_the_layout_of_the_speculators_library_is_told_from_a_specblock_drafters(tmp_path):
    (tmp_path / "config.json").write_text('{"speculators_model_type": "jetspec"}')
    assert kind_of(tmp_path) == "jetspec"
    with pytest.raises(CheckpointError, match="the layout of the speculators library"):
        checkpoint.read_config(tmp_path)


WRONG = {
    "not said": ({"dflash_config": PUBLISHED["dflash_config"]}, "rows all see each other"),
    "said to be none": ({"dflash_config": OWN | {"causal_head": False}}, "rows all see each other"),
    "contradiction": ({"dflash_config": OWN | {"causal": False}}, "causal_head and causal that"),
    "layout": ({"speculators_model_type": "jetspec"}, "the layout of the speculators library"),
    "width": ({"dflash_config": OWN | {"target_hidden_size": 64}}, "a width that is not the"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    "mask": ({"dflash_config": {"causal_head": True, "target_layer_ids": [1]}}, "mask_token_id"),
    "layers": ({"dflash_config": {"causal_head": True, "mask_token_id": 3}}, "target_layer_ids"),
    "block": ({"block_size": None}, "lacks the key 'block_size'"),
    "heads": ({"num_key_value_heads": 3}, "must be a multiple of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_cannot_be_drafted_with(case):
    changes, says = WRONG[case]
    with pytest.raises(CheckpointError, match=says) as error:
        from_json(JETSPEC | changes, "config.json", causal=True)
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


def test_neither_kind_takes_the_other_for_its_own(tmp_path):
    causal = write(tmp_path / "causal", make_model(JETSPEC), JETSPEC)
    both_ways = write(tmp_path / "both_ways", make_model())
    assert "only plain DFlash drafters" in refusal(of_dflash, causal)
    assert "only plain JetSpec drafters" in refusal(checkpoint, both_ways)


def test_tensors_that_are_not_what_config_json_says(tmp_path):
    model = make_model(JETSPEC)
    for changes, says in (
        ({"num_hidden_layers": 1}, "has no use for"),
        ({"num_hidden_layers": 4}, "lacks layers.3"),
        ({"intermediate_size": 40}, "asks for ["),
    ):
        assert says in refusal(checkpoint, write(tmp_path / "drafter", model, JETSPEC | changes))
