"""Untrained drafters follow their target, and what cannot be is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.targets import edit_config, write_target

from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.train.untrained import init


@pytest.fixture
def target(tmp_path) -> Path:
    return write_target(tmp_path / "target")


@pytest.mark.parametrize("layers", [1, 6])
def test_shallow_targets_have_no_default_layer_ids(target, layers):
    write_target(target, num_hidden_layers=layers)
    with pytest.raises(CheckpointError, match="--layer-ids"):
        init(target)


@pytest.mark.parametrize("ids", [(2, 2, 5), (2, 5, 9), (-1, 3, 5)])
def test_init_refuses_layer_ids_that_are_not_the_targets(target, ids):
    with pytest.raises(CheckpointError, match="from 0 to 8"):
        init(target, layer_ids=ids)


def test_init_follows_the_target(target):
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_target(target, rope_parameters={"rope_theta": 5e5, **llama3}, head_dim=32)
    edit_config(target, rope_theta=...)
    config = init(target, layer_ids=(1, 2, 8)).config
    assert (config.rope_theta, config.rope_scaling) == (5e5, llama3)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (32, 2, 96)
    assert init(target, intermediate_size=24).layers[0].mlp.gate_proj.weight.shape == (24, 64)
    assert config.target.layer_ids == (1, 2, 8)
    assert config.target.name == str(target)
    assert config.draft_vocab_size == 160
    assert not config.qk_norm


def test_init_gives_qwen3_targets_a_qk_norm(target):
    write_target(target, model_type="qwen3")
    state = init(target).state_dict()
    for name in ("q_norm", "k_norm"):
        assert state[f"layers.1.self_attn.{name}.weight"].shape == (16,)
    assert not init(target, qk_norm=False).config.qk_norm


def test_init_starts_without_a_shift(target):
    drafter = init(target, num_layers=3)
    wanted = torch.cat([torch.eye(64), torch.zeros(64, 64)], dim=1)
    for shift in drafter.shift_proj:
        assert torch.equal(shift.weight, wanted)
    assert (drafter.norm.weight == 1).all()


def test_init_is_seeded_and_leaves_the_global_generator_alone(target):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, again, other = (init(target, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_init_maps_the_first_or_the_most_frequent_ids(target):
    first = init(target, draft_vocab_size=32)
    assert torch.equal(first.target_ids(torch.arange(32)), torch.arange(32))
    assert torch.equal(first.t2d, torch.arange(160) < 32)
    counts = torch.zeros(160, dtype=torch.int64)
    frequent = torch.tensor([150, 3, 77, 76, 9, 11, 20, 21, 22, 100])
    counts[frequent] = torch.arange(10, 0, -1)
    drafter = init(target, draft_vocab_size=12, token_counts=counts)
    wanted = torch.cat([frequent, torch.tensor([0, 1])]).sort().values  # ties: lower ids
    assert torch.equal(drafter.target_ids(torch.arange(12)), wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma3"}, "llama and qwen3 with 'silu'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "llama and qwen3 with 'silu'"),
        ({"vocab_size": None}, "vocab_size = None"),
    ],
)
def test_init_refuses_other_targets(target, changes, said):
    write_target(target)
    edit_config(target, **changes)
    with pytest.raises(CheckpointError, match=said):
        init(target)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 0}, "'block_size' = 0"),
        ({"draft_vocab_size": 161}, "must not exceed vocab_size, 160"),
    ],
    ids=str,
)
def test_init_refuses_impossible_sizes(target, options, said):
    with pytest.raises(CheckpointError, match=said):
        init(target, **options)
