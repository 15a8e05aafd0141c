"""Angles from kept tables are those of the definition, to the last bit."""

from __future__ import annotations

import pytest
import torch
from support.records import small_drafter

from vllm_specblock.drafters.common.rope import Rotary, inverse_frequencies

CONFIG = small_drafter(head_dim=64, rope_theta=5e5).config


def by_definition(base, dtype, config):
    """cos and signed sin of every position, [T, K, 1, D]."""
    position = base[:, None] + torch.arange(CONFIG.block_size)
    angle = position[..., None, None].float() * inverse_frequencies(config)[0]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}], ids=str)
def test_no_bit_changes_through_a_meta_device_and_another_dtype(scaling, dtype):
    config = CONFIG.model_copy(update={"rope_scaling": scaling})
    with torch.device("meta"):
        rotary = Rotary(config, block_size=CONFIG.block_size)
    rotary = rotary.to_empty(device="cpu").to(torch.bfloat16)
    base = torch.cat([torch.arange(40), torch.randint(1 << 20, (500,))])
    for found, wanted in zip(rotary(base, dtype).table, by_definition(base, dtype, config)):
        assert found.dtype == dtype and torch.equal(found, wanted)


def test_a_part_of_a_head_is_scaled_once():
    """The dimensions that turn are counted already; a checkpoint names their share as well."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    whole, part = (
        CONFIG.model_copy(update={"rope_scaling": scaling | share})
        for share in ({}, {"partial_rotary_factor": 0.5})
    )
    assert torch.equal(inverse_frequencies(part, 32)[0], inverse_frequencies(whole, 32)[0])
