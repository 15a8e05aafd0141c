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
    ("changes", "options", "said"),
    [
        ({"model_type": "gemma3"}, {}, "llama and qwen3 with 'silu'"),
        ({"hidden_act": "gelu"}, {}, "llama and qwen3 with 'silu'"),
        ({"vocab_size": None}, {}, "vocab_size = None"),
        ({"num_hidden_layers": 1}, {}, "--layer-ids"),
        ({}, {"layer_ids": (2, 2, 5)}, "from 0 to 8"),
        ({}, {"layer_ids": (-1, 3, 5)}, "from 0 to 8"),
        ({}, {"block_size": 0}, "'block_size' = 0"),
        ({}, {"draft_vocab_size": 161}, "must not exceed vocab_size, 160"),
    ],
)
def test_init_refuses_other_targets_and_impossible_sizes(target, changes, options, said):
    edit_config(target, **changes)
    with pytest.raises(CheckpointError, match=said):
        init(target, **options)
