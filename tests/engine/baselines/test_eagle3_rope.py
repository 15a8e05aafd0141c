"""RoPE of an EAGLE-3 checkpoint: scores of queries and keys are those of vLLM's own RoPE.

vLLM reads the config.json itself here: keys that move or are missing must mean the same to both.
"""

from __future__ import annotations

import json

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config
from vllm_specblock.triton_kernels.layers.rope import rotate_pair

from vllm_specblock.drafters.common.rope import Rotary, rewritten
from vllm_specblock.drafters.eagle3.config import from_json

D, HEADS, ROWS = 16, 2, 24
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": D,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
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
    "partial yarn": THETA | {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
}


def flat(kind: str, rope: dict) -> dict:
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    return SIZES | {"model_type": kind, "architectures": [name], "draft_vocab_size": 40} | rope


def speculators(kind: str, rope: dict) -> dict:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target"},
        },
        "transformer_layer_config": SIZES | {"model_type": kind} | rope,
    }


def theirs(config, query, key, position):
    """vLLM's own rotation of query [T, heads, D] and key [T, 1, D]."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None and config.architectures == ["Eagle3Qwen3ForCausalLM"]:
        parameters = {"rope_type": "default", "rope_theta": 1e6}  # as its layer does
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(D, 128, rope_parameters=parameters, dtype=torch.float32)
    turned = rope.forward_native(position, query.flatten(1), key.flatten(1))
    return turned[0].view_as(query), turned[1].view_as(key)


@pytest.mark.parametrize(
    ("kind", "layout"), [("llama", flat), ("qwen3", flat), ("qwen3", speculators)]
)
@pytest.mark.parametrize("name", ROPES)
@torch.no_grad()
def test_scores_are_those_of_vllm(name, layout, kind, tmp_path):
    raw = layout(kind, ROPES[name])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape = from_json(raw, "config.json")
    torch.manual_seed(0)
    stored = {}
    for which, rows in (("q", HEADS * D), ("k", D)):
        part = f"midlayer.self_attn.{which}_"
        stored[f"{part}proj.weight"] = torch.randn(rows, 8)
        stored[f"{part}proj.bias"] = torch.randn(rows)
        stored[f"{part}norm.weight"] = torch.rand(D) + 0.5
    state, position = torch.randn(ROWS, 8), torch.randint(0, 100, (ROWS,))

    def projected(tensors):
        for which in "qk":
            part = f"midlayer.self_attn.{which}_"
            out = state @ tensors[part + "proj.weight"].T + tensors[part + "proj.bias"]
            out = out.unflatten(-1, (-1, D))
            if shape.qk_norm:
                out = torch.nn.functional.rms_norm(out, (D,), tensors[part + "norm.weight"], 1e-5)
            yield out

    query, key = theirs(get_config(str(tmp_path), False), *projected(stored), position)
    wanted = torch.einsum("ihd,jhd->hij", query, key.expand_as(query))
    rope = Rotary(shape, shape.rotary_dim)(position, torch.float32)
    query, key = rotate_pair(*projected(rewritten(stored, shape)), rope)
    found = torch.einsum("ihd,jhd->hij", query, key.expand_as(query))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
