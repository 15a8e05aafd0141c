"""DFlash and JetSpec checkpoints: the authors' layouts load."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch
from support.dflash import JETSPEC, PUBLISHED, make_model, write
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.drafters.common.checkpoint_files import wanted_shapes
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.dflash.config import from_json
from vllm_specblock.drafters.dflash.model import FILES, DFlashModel

OWN = PUBLISHED["dflash_config"]


@pytest.mark.parametrize(("kind", "raw"), [("dflash", PUBLISHED), ("jetspec", JETSPEC)])
def test_the_published_layout_loads(kind, raw, tmp_path):
    model = make_model(raw)
    folder = write(tmp_path / "drafter", model, raw)
    assert kind_of(folder) == kind
    config = FILES.read_config(folder)
    FILES.check_tensors(folder, config)
    loaded = FILES.load(folder)
    assert loaded.wants_head and loaded.config == config == model.config
    assert config.causal is (kind == "jetspec")
    wanted, found = model.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert "draft vocabulary: 64 of 64 target tokens" in shown.output


def test_what_config_json_says():
    shape = from_json(PUBLISHED, "config.json")
    # Named by the last layer that was run, counted from 0.
    assert shape.target_layers(8) == (2, 4, 6)
    assert (shape.masks, shape.mask_token_id, shape.rope_theta) == (4, 60, 1e6)
    newer = {key: value for key, value in PUBLISHED.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert from_json(newer, "config.json").rope_theta == 5e5
    inside = PUBLISHED | {"dflash_config": OWN | {"block_size": 9}}
    assert from_json(inside, "config.json").masks == 8


def test_a_published_jetspec_checkpoint_by_its_numbers():
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
    config = from_json(raw, "config.json")
    shapes = wanted_shapes(partial(DFlashModel, config))
    assert sum(map(prod, shapes.values())) == 1_048_626_432
    assert tuple(shapes["fc.weight"]) == (4096, 5 * 4096) and config.masks == 15


@pytest.mark.parametrize(
    "keys",
    [
        {"dflash_config": OWN | {"causal_head": True}},
        {"dflash_config": OWN | {"causal": True}},
        {"dflash_config": OWN | {"causal_head": True, "causal": True}},
        {"is_causal": True},
    ],
    ids=["authors", "vllm", "both", "flat"],
)
def test_where_a_config_says_that_blocks_are_causal(keys, tmp_path):
    folder = write(tmp_path / "drafter", make_model(), PUBLISHED | keys)
    assert kind_of(folder) == "jetspec" and FILES.read_config(folder).causal
    folder = write(tmp_path / "other", make_model(), JETSPEC | {"dflash_config": OWN})
    assert kind_of(folder) == "dflash" and not FILES.read_config(folder).causal


def test_the_factor_of_yarn_is_in_the_norms(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
    raw = PUBLISHED | {"rope_scaling": scaling}
    model = make_model(raw)
    loaded = FILES.load(write(tmp_path / "drafter", model, raw))
    for mine, its in zip(loaded.layers, model.layers):
        for name in ("q_norm", "k_norm"):
            mine_, its_ = (getattr(each.self_attn, name).weight for each in (mine, its))
            assert torch.allclose(mine_, 1.5 * its_)
        assert torch.equal(mine.self_attn.q_proj.weight, its.self_attn.q_proj.weight)
