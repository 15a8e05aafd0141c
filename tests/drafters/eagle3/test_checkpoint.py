"""EAGLE-3 checkpoints: every layout that vLLM loads, and one sentence for what we do not."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.validation import refusal

from vllm_specblock.drafters.common.checkpoint_files import wanted_shapes
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.eagle3.checkpoint import FILES
from vllm_specblock.drafters.eagle3.config import from_json
from vllm_specblock.drafters.eagle3.model import Eagle3Model

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


def refused(directory: Path) -> str:
    return refusal(FILES, directory)


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
    del tensors["layers.2.mlp.up_proj.bias"]
    assert "lacks layers.2.mlp.up_proj.bias" in refused(write(tmp_path / "less", raw, tensors))


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, None),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, (2, 3, 4)),
        # Other engines write it there, and count otherwise: vLLM's runner takes its default.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, None),
        ({"eagle_config": {"layer_ids": [1, 5, 9]}}, (1, 5, 9)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]},
            },
            (2, 3),
        ),
    ],
)
def test_where_layer_ids_stand(changes, ids):
    config = from_json(OFFICIAL | changes, "config.json")
    assert config.layer_ids == ids and config.num_features == len(ids or range(3))


def test_rope_and_norm_before_fc():
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    raw = OFFICIAL | {
        "rope_theta": 5e5,
        "rope_scaling": llama3,
        "norm_before_fc": False,
        "eagle_config": {"norm_before_fc": True, "use_aux_hidden_state": True},
    }
    config = from_json(raw, "config.json")
    assert (config.rope_theta, config.rope_scaling) == (5e5, llama3)
    assert config.norm_before_fc and not config.norm_before_residual
    assert from_json(OFFICIAL, "config.json").rope_theta == 10000.0


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


def test_head_dim_that_is_left_out_is_that_of_the_architecture():
    assert from_json(OFFICIAL, "config.json").head_dim == 8
    qwen = OFFICIAL | {"architectures": ["Eagle3Qwen3ForCausalLM"]}
    assert from_json(qwen, "config.json").head_dim == 128


def test_other_models_are_none(tmp_path):
    assert kind_of(FIXTURES / "llama") == "specblock"
    raw = {k: v for k, v in OFFICIAL.items() if k != "draft_vocab_size"}
    write(tmp_path, raw | {"architectures": ["LlamaForCausalLM"]}, {})
    assert kind_of(tmp_path) == "specblock"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = false"),
        ({"parallel_drafting": True}, "parallel drafting"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "drafts in parallel (P-EAGLE)"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "must be one of LlamaForCausalLMEagl"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window attention"),
        ({"partial_rotary_factor": 1.5}, "turns 12 dimensions of a head, which has 8"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "one of default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "has factor = None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}, "beta_fast"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"num_attention_heads": 0}, "'num_attention_heads' = 0"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, 3"),
        ({"draft_vocab_size": 65}, "must not exceed vocab_size, 64"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2, 4]}, "in ascending order"),
        ({"eagle_aux_hidden_state_layer_ids": "2,3"}, "'layer_ids' = '2,3'"),
        ({"num_aux_hidden_states": 4}, "fuses 4 hidden states of the target, but names 3"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, said):
    directory = write(tmp_path, OFFICIAL | changes, {})
    assert kind_of(directory) == "eagle3"
    assert said in refused(directory)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "peagle"}, "drafts in parallel (P-EAGLE)"),
        ({"transformer_layer_config": None}, "transformer_layer_config = None"),
        ({"transformer_layer_config": {"model_type": "gemma"}}, "of architecture ['gemma']"),
        ({"quantization_config": {"format": "int8"}}, "quantised weights"),
    ],
)
def test_speculators_configs_that_are_refused(tmp_path, changes, said):
    directory = write(tmp_path, speculators() | changes, {})
    assert kind_of(directory) == "eagle3"
    assert said in refused(directory)


def edited(tmp_path: Path, edit) -> str:
    tensors = drafter_of(OFFICIAL).state_dict()
    edit(tensors)
    return refused(write(tmp_path / "it", OFFICIAL, tensors))


def test_tensors_that_do_not_fit(tmp_path):
    # The target's LM head names other tokens, and has another place for each.
    assert "lacks lm_head.weight" in edited(tmp_path, lambda t: t.pop("lm_head.weight"))
    assert "lacks d2t" in edited(tmp_path, lambda t: t.pop("d2t"))
    message = edited(tmp_path, lambda t: t.update({"layers.1.norm.weight": torch.zeros(1)}))
    assert "holds layers.1.norm.weight" in message
    message = edited(tmp_path, lambda t: t.update({"fc.weight": torch.zeros(32, 64)}))
    assert "fc.weight has shape [32, 64], but its config.json asks for [32, 96]" in message


@pytest.mark.parametrize("d2t", [torch.arange(40), torch.full((40,), -1), torch.zeros(40)])
def test_mappings_that_are_none(tmp_path, d2t):
    """Ids in place of offsets, ids below 0, a float."""
    message = edited(tmp_path, lambda t: t.update({"d2t": d2t}))
    assert "d2t holds offsets, not ids" in message


def test_a_target_of_another_width_needs_an_embedding_of_its_own(tmp_path):
    raw = OFFICIAL | {"target_hidden_size": 24}
    message = refused(write(tmp_path, raw, drafter_of(raw).state_dict()))
    assert "lacks embed_tokens.weight" in message


def test_indices_that_are_none(tmp_path):
    directory = write(tmp_path, OFFICIAL, drafter_of(OFFICIAL).state_dict())
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "model-2.safetensors"}}))
    assert "names model-2.safetensors, which is no file in" in refused(directory)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../model.safetensors"}}))
    assert "names ../model.safetensors, which is no file in" in refused(directory)
    index.write_text("{}")
    assert "has no weight_map" in refused(directory)


def test_missing_and_broken_files(tmp_path):
    directory = write(tmp_path / "it", OFFICIAL, drafter_of(OFFICIAL).state_dict())
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    assert "not a whole safetensors file" in refused(directory)
    weights.unlink()
    assert "neither a .safetensors file nor a pytorch_model.bin" in refused(directory)
    (directory / "pytorch_model.bin").write_text("hello")
    assert "is not a plain dict of tensors" in refused(directory)
    torch.save([torch.zeros(1)], directory / "pytorch_model.bin")
    assert "is not a plain dict of tensors" in refused(directory)
    with pytest.raises(CheckpointError, match="There is no directory"):
        kind_of(tmp_path / "org" / "head")
