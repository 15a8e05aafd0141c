"""EAGLE-3 checkpoints: every layout that vLLM loads."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_specblock.drafters.common.checkpoint_files import wanted_shapes
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.eagle3.config import from_json
from vllm_specblock.drafters.eagle3.model import FILES, Eagle3Model

FIXTURES = Path(__file__).parents[2] / "fixtures"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}
OFFICIAL = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": 40,
}


def speculators(model_type: str = "llama", **top) -> dict:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "target_hidden_size": None,
        "transformer_layer_config": SIZES
        | {"model_type": model_type, "architectures": ["LlamaForCausalLM"], "head_dim": 8},
        **top,
    }


def drafter_of(raw: dict, own_embedding: bool = False) -> Eagle3Model:
    torch.manual_seed(0)
    drafter = Eagle3Model(from_json(raw, "config.json"), own_embedding)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_()
        count = drafter.config.draft_vocab_size
        named = torch.randperm(drafter.config.vocab_size)[:count].sort().values
        drafter.d2t.copy_(named - torch.arange(count))
    return drafter


def write(directory: Path, raw: dict, tensors: dict[str, torch.Tensor], binary=False) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    if binary:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def assert_loads(directory: Path, drafter: Eagle3Model) -> None:
    assert kind_of(directory) == "eagle3"
    config = FILES.read_config(directory)
    FILES.check_tensors(directory, config)
    loaded = FILES.load(directory)
    assert loaded.config == drafter.config == config
    wanted, found = drafter.state_dict(), loaded.state_dict()
    assert wanted.keys() == found.keys()
    for name in wanted:
        assert torch.equal(wanted[name], found[name]), name


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"]
)
def test_official_layout(tmp_path, architecture, binary):
    raw = OFFICIAL | {"architectures": [architecture]}
    drafter = drafter_of(raw)
    tensors = drafter.state_dict() | {"t2d": torch.zeros(64, dtype=torch.bool)}
    assert_loads(write(tmp_path / "it", raw, tensors, binary), drafter)


def test_speculators_layout(tmp_path):
    """`layers.0`, an embedding of its own, and norms before the residual unless said otherwise."""
    raw = speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 5])
    drafter = drafter_of(raw, own_embedding=True)
    assert drafter.config.norm_before_residual and drafter.config.layer_ids == (1, 2, 5)
    tensors = {n.replace("midlayer", "layers.0"): t for n, t in drafter.state_dict().items()}
    assert_loads(write(tmp_path / "it", raw, tensors), drafter)


def test_every_variant_of_a_qwen3_head(tmp_path):
    raw = speculators(
        "qwen3",
        norm_before_residual=False,
        norm_before_fc=True,
        fc_norm=True,
        norm_output=True,
        target_hidden_size=24,
    )
    raw["transformer_layer_config"] |= {"attention_bias": True, "logit_scale": 2.0}
    config = from_json(raw, "config.json")
    assert config.qk_norm and config.qkv_bias and not config.output_bias
    assert config.norm_before_fc and config.fc_norm and config.norm_output
    assert (config.norm_before_residual, config.logit_scale) == (False, 2.0)
    drafter = drafter_of(raw, own_embedding=True)
    assert drafter.fc.weight.shape == (32, 3 * 24)
    assert_loads(write(tmp_path / "it", raw, drafter.state_dict()), drafter)


def test_projections_may_be_fused_and_names_prefixed(tmp_path):
    raw = OFFICIAL | {"attention_bias": True}
    drafter = drafter_of(raw)
    tensors = {f"model.{name}": tensor for name, tensor in drafter.state_dict().items()}
    for what in ("weight", "bias"):
        parts = [tensors.pop(f"model.midlayer.self_attn.{x}_proj.{what}") for x in "qkv"]
        tensors[f"model.layers.0.self_attn.qkv_proj.{what}"] = torch.cat(parts)
    parts = [tensors.pop(f"model.midlayer.mlp.{x}_proj.weight") for x in ("gate", "up")]
    tensors["model.midlayer.mlp.gate_up_proj.weight"] = torch.cat(parts)
    tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
    assert_loads(write(tmp_path / "it", raw, tensors), drafter)


def test_sharded_files_are_read_together_and_those_of_an_index_alone(tmp_path):
    drafter = drafter_of(OFFICIAL)
    directory = write(tmp_path / "it", OFFICIAL, {})
    names = sorted(tensors := drafter.state_dict())
    (directory / "model.safetensors").unlink()
    shards = {f"model-{part}.safetensors": names[part::2] for part in range(2)}
    for file, chosen in shards.items():
        save_file({name: tensors[name].contiguous() for name in chosen}, directory / file)
    assert_loads(directory, drafter)
    named = {name: file for file, chosen in shards.items() for name in chosen}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": named}))
    save_file({"fc.weight": torch.zeros(1)}, directory / "consolidated.safetensors")
    assert_loads(directory, drafter)


def test_without_an_lm_head_and_a_mapping(tmp_path):
    """The head is the target's, where the drafter names the target's tokens from its width."""
    raw = {k: v for k, v in OFFICIAL.items() if k != "draft_vocab_size"}
    whole = drafter_of(raw)
    whole.d2t.zero_()
    tensors = whole.state_dict()
    head = tensors.pop("lm_head.weight")
    del tensors["d2t"]
    loaded = FILES.load(write(tmp_path / "it", raw, tensors))
    assert loaded.wants_head and not whole.wants_head
    loaded.share_head(head)
    assert not loaded.wants_head and loaded.lm_head.weight.data_ptr() == head.data_ptr()
    state = torch.randn(3, 32)
    assert torch.equal(loaded.logits(state), whole.logits(state))


def test_a_mapping_told_the_other_way_alone(tmp_path):
    drafter = drafter_of(OFFICIAL)
    tensors = drafter.state_dict()
    t2d = torch.zeros(64, dtype=torch.bool)
    t2d[tensors.pop("d2t") + torch.arange(40)] = True
    assert_loads(write(tmp_path / "it", OFFICIAL, tensors | {"t2d": t2d}), drafter)


def test_fc_with_a_bias(tmp_path):
    """SGLang's trainers may write one, and no key of the config says so."""
    tensors = drafter_of(OFFICIAL).state_dict()
    tensors["fc.bias"] = torch.randn(32)
    loaded = FILES.load(write(tmp_path / "it", OFFICIAL, tensors))
    states = torch.randn(5, 96)
    wanted = states @ tensors["fc.weight"].T + tensors["fc.bias"]
    torch.testing.assert_close(loaded.fuse(states), wanted)


def test_several_layers_and_biases_of_the_mlp(tmp_path):
    raw = OFFICIAL | {"num_hidden_layers": 3, "mlp_bias": True, "attention_bias": True}
    drafter = drafter_of(raw)
    assert drafter.layers["2"].mlp.down_proj.bias is not None
    assert drafter.layers["1"].self_attn.q_proj.weight.shape == (32, 32)
    tensors = {n.replace("midlayer", "layers.0"): t for n, t in drafter.state_dict().items()}
    # vLLM's layers all have this norm, and read it in the first.
    tensors["layers.1.hidden_norm.weight"] = torch.ones(32)
    assert_loads(write(tmp_path / "it", raw, tensors), drafter)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"layer_ids": None, "num_features": 3, "head_dim": 8, "rope_theta": 10000.0}),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 3]},
            {"layer_ids": (2, 3), "num_features": 2},
        ),
        # Other engines write it there, and count otherwise: vLLM's runner takes its default.
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}},
            {"layer_ids": None, "num_features": 3},
        ),
        ({"eagle_config": {"layer_ids": [1, 5, 9]}}, {"layer_ids": (1, 5, 9), "num_features": 3}),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]},
            },
            {"layer_ids": (2, 3)},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        (
            {
                "norm_before_fc": False,
                "eagle_config": {"norm_before_fc": True, "use_aux_hidden_state": True},
            },
            {"norm_before_fc": True, "norm_before_residual": False},
        ),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, {"head_dim": 128}),
    ],
)
def test_what_config_json_says(changes, wanted):
    config = from_json(OFFICIAL | changes, "config.json")
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_a_published_head_by_its_numbers():
    """EAGLE3-LLaMA3.1-Instruct-8B, by what its config.json holds; tensors without memory."""
    raw = OFFICIAL | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    config = from_json(raw, "config.json")
    shapes = wanted_shapes(lambda: Eagle3Model(config))
    assert shapes["midlayer.self_attn.k_proj.weight"] == (1024, 8192)
    assert shapes["fc.weight"] == (4096, 3 * 4096)
    assert sum(map(prod, shapes.values())) == 424_721_664


def test_other_models_are_none(tmp_path):
    assert kind_of(FIXTURES / "llama") == "specblock"
    raw = {k: v for k, v in OFFICIAL.items() if k != "draft_vocab_size"}
    write(tmp_path, raw | {"architectures": ["LlamaForCausalLM"]}, {})
    assert kind_of(tmp_path) == "specblock"
