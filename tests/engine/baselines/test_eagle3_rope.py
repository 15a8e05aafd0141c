"""RoPE of an EAGLE-3 checkpoint: angles and factors are vLLM's, which reads the config.json itself.

Keys that move or are missing mean the same to both. Scores: test_step_by_step.py.
"""

from __future__ import annotations

import json

import pytest
import torch
from support.eagle3 import SIZES, speculators_json
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config

from vllm_specblock.drafters.common.rope import inverse_frequencies
from vllm_specblock.drafters.eagle3.config import from_json

D = 16
CHANGES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": D}
LAYER = SIZES | CHANGES | {"max_position_embeddings": 128}
THETA = {"rope_theta": 5000.0}
DEFAULT, LINEAR = {"rope_type": "default"}, {"factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXT = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, **CONTEXT}
ALL_KEYS = {"beta_fast": 8, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
ROPES = {
    "nothing said": {},
    "theta": THETA,
    "transformers 5": {"rope_parameters": DEFAULT | THETA},
    "theta twice": {"rope_theta": 3.0, "rope_parameters": DEFAULT | THETA},
    "theta inside scaling": {"rope_theta": 3.0, "rope_scaling": YARN | THETA},
    "parameters and scaling": {"rope_parameters": DEFAULT | THETA, "rope_scaling": YARN},
    "linear": THETA | {"rope_scaling": {"rope_type": "linear", **LINEAR}},
    "linear, old word": THETA | {"rope_scaling": {"type": "linear", **LINEAR}},
    "llama3": THETA | {"rope_scaling": LLAMA3 | CONTEXT},
    "llama3 of the whole context": THETA | {"rope_scaling": LLAMA3},
    "yarn": THETA | {"rope_scaling": YARN},
    "yarn, transformers 5": {"rope_parameters": YARN | THETA},
    "yarn, context outside": THETA | {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    "yarn, all keys": THETA | {"rope_scaling": YARN | ALL_KEYS},
    "yarn, its factor": THETA | {"rope_scaling": YARN | {"attention_factor": 1.5}},
    "partial": THETA | {"partial_rotary_factor": 0.5},
    "partial, transformers 5": {
        "rope_parameters": THETA | DEFAULT | {"partial_rotary_factor": 0.25}
    },
    "partial, no type": {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}},
    "partial yarn": THETA | {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
}


def flat(kind: str, rope: dict) -> dict:
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    return LAYER | {"model_type": kind, "architectures": [name], "draft_vocab_size": 40} | rope


def speculators(kind: str, rope: dict) -> dict:
    return speculators_json(LAYER | {"model_type": kind} | rope, draft_vocab_size=40)


@pytest.mark.parametrize(
    ("kind", "layout"), [("llama", flat), ("qwen3", flat), ("qwen3", speculators)]
)
@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_vllm(name, layout, kind, tmp_path):
    raw = layout(kind, ROPES[name])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = get_config(str(tmp_path), False)
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None and config.architectures == ["Eagle3Qwen3ForCausalLM"]:
        parameters = {"rope_type": "default", "rope_theta": 1e6}  # as its layer does
    with set_current_vllm_config(VllmConfig()):
        wanted = get_rope(D, 128, rope_parameters=parameters, dtype=torch.float32).cos_sin_cache
    shape = from_json(raw, "config.json")
    frequency, factor = inverse_frequencies(shape, shape.rotary_dim or D)
    angle = torch.arange(100)[:, None] * frequency
    found = factor * torch.cat([angle.cos(), angle.sin()], 1)
    torch.testing.assert_close(found, wanted[:100], rtol=1e-4, atol=1e-4)
