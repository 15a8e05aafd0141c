"""EAGLE-3, DFlash and JetSpec checkpoints: every layout that vLLM or the authors load."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import dflash as made
from support.dflash import JETSPEC, PUBLISHED, make_model
from support.dflash import write as write_dflash
from support.eagle3 import SIZES, small_eagle3, speculators_json
from support.targets import LLAMA3
from support.tensors import assert_equal
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.drafters.common.checkpoint_files import wanted_shapes
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.dflash import config as dflash
from vllm_specblock.drafters.dflash.model import DFlashModel
from vllm_specblock.drafters.eagle3 import config as eagle3
from vllm_specblock.drafters.eagle3.model import FILES, Eagle3Model
from vllm_specblock.drafters.registry import drafter_kind

OFFICIAL = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": 40,
}
WHOLE = {key: value for key, value in OFFICIAL.items() if key != "draft_vocab_size"}
OWN = PUBLISHED["dflash_config"]


def speculators(model_type: str = "llama", layer: dict | None = None, **top) -> dict:
    named = {"model_type": model_type, "architectures": ["LlamaForCausalLM"], "head_dim": 8}
    layer = SIZES | named | (layer or {})
    return speculators_json(layer, **{"draft_vocab_size": 40, "target_hidden_size": None} | top)


def drafter_of(raw: dict) -> Eagle3Model:
    """Random weights; in the speculators layout with an embedding of its own."""
    config = eagle3.from_json(raw, "config.json")
    return small_eagle3("speculators_model_type" in raw, **config.model_dump())


def with_masks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As P-EAGLE's are written: the masks' features of three dimensions."""
    return in_layers(tensors) | {"mask_hidden": tensors["mask_hidden"][None, None]}


def write(directory: Path, raw: dict, tensors: dict[str, torch.Tensor], binary=False) -> Path:
    (directory / "config.json").write_text(json.dumps(raw))
    if binary:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def assert_loads(directory: Path, drafter: Eagle3Model | DFlashModel, kind: str = "eagle3") -> None:
    assert kind_of(directory) == kind
    loaded = drafter_kind(kind).load_checkpoint_module().load(directory)
    assert loaded.config == drafter.config and loaded.wants_head == drafter.wants_head
    assert_equal(loaded.state_dict(), drafter.state_dict())


def in_layers(tensors):
    """vLLM's layers all have a norm of the feature, and read it in the first."""
    named = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    return named | {"layers.1.hidden_norm.weight": torch.ones(32)}


def fused(tensors):
    """Names have a prefix, too."""
    for what in ("weight", "bias"):
        parts = [tensors.pop(f"midlayer.self_attn.{x}_proj.{what}") for x in "qkv"]
        tensors[f"layers.0.self_attn.qkv_proj.{what}"] = torch.cat(parts)
    parts = [tensors.pop(f"midlayer.mlp.{x}_proj.weight") for x in ("gate", "up")]
    tensors["midlayer.mlp.gate_up_proj.weight"] = torch.cat(parts)
    head = tensors.pop("lm_head.weight")
    return {f"model.{n}": tensor for n, tensor in tensors.items()} | {"lm_head.weight": head}


def both_ways(tensors):
    """With the tokens that d2t leads to marked."""
    t2d = torch.zeros(64, dtype=torch.bool)
    t2d[tensors["d2t"] + torch.arange(40)] = True
    return tensors | {"t2d": t2d}


def marked(tensors):
    return {name: tensor for name, tensor in both_ways(tensors).items() if name != "d2t"}


QWEN3 = {
    "norm_before_residual": False,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "target_hidden_size": 24,
}
BIASES = {"mlp_bias": True, "attention_bias": True}
ARCHITECTURES = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"]
LAYOUTS = {
    **{name: (OFFICIAL | {"architectures": [name]}, both_ways, {}) for name in ARCHITECTURES},
    "speculators": (
        speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 5]),
        in_layers,
        {"norm_before_residual": True, "layer_ids": (1, 2, 5)},
    ),
    "every variant of Qwen3": (
        speculators("qwen3", {"attention_bias": True, "logit_scale": 2.0}, **QWEN3),
        dict,
        QWEN3 | {"qk_norm": True, "qkv_bias": True, "output_bias": False, "logit_scale": 2.0},
    ),
    "P-EAGLE": (
        speculators(speculators_model_type="peagle", mask_token_id=63),
        with_masks,
        {"mask_token_id": 63, "norm_before_residual": False},
    ),
    "flat P-EAGLE": (
        OFFICIAL | {"architectures": ["PeagleLlamaForCausalLM"], "pard_token": 62},
        with_masks,
        {"mask_token_id": 62},
    ),
    "windows": (
        OFFICIAL | {"layer_types": ["sliding_attention"] * 9, "sliding_window": 7},
        in_layers,
        {"windows": (7,)},
    ),
    "fused": (OFFICIAL | {"attention_bias": True}, fused, {"qkv_bias": True, "output_bias": True}),
    "t2d alone": (OFFICIAL, marked, {}),
    "several layers": (OFFICIAL | BIASES | {"num_hidden_layers": 3}, in_layers, {"mlp_bias": True}),
}


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_of_eagle3_loads(tmp_path, layout, binary):
    raw, stored, says = LAYOUTS[layout]
    drafter = drafter_of(raw)
    assert {name: getattr(drafter.config, name) for name in says} == says
    kind = "peagle" if drafter.config.mask_token_id else "eagle3"
    assert_loads(write(tmp_path, raw, stored(drafter.state_dict()), binary), drafter, kind)


@pytest.mark.parametrize(
    ("kind", "raw", "says"),
    [
        ("dflash", PUBLISHED, {"layer_windows": (None,) * 2, "layer_causal": (False,) * 2}),
        ("jetspec", JETSPEC, {"layer_causal": (True,) * 3}),
        ("dflash", made.WINDOWS, {"layer_windows": (None, 6, 6)}),
        ("dflash", made.WINDOWS, {"layer_causal": (False, True, True)}),
        ("dflash2", made.DFLASH2, {"selector_top_k": 5, "conv_kernel_size": 3}),
        ("dspark", made.FLAT_DSPARK, {"from_root": True, "masks": 4, "layer_ids": (2, 4, 6)}),
        ("dspark", made.DSPARK, {"from_root": True, "masks": 4, "layer_ids": (2, 4, 6)}),
        ("dflash", made.speculators("dflash", made.WINDOWED), {"layer_causal": (True,) * 2}),
        (
            "dflash",
            made.speculators("dflash", made.WINDOWED, sliding_window_non_causal=True),
            {"layer_causal": (False,) * 2, "layer_windows": (6, 6), "draft_vocab_size": 40},
        ),
        (
            "dflash2",
            made.speculators("dflash2", **made.DFLASH2["dflash_config"]),
            {"conv_group_size": 8, "selector_rank": 6, "layer_ids": (2, 4, 6)},
        ),
    ],
)
def test_a_layout_of_dflash_loads(kind, raw, says, tmp_path):
    model = make_model(raw)
    folder = write_dflash(tmp_path / "drafter", model, raw)
    assert {name: getattr(model.config, name) for name in says} == says
    assert model.wants_head is ("speculators_model_type" not in raw)
    assert_loads(folder, model, kind)
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0, shown.output
    count = model.config.draft_vocab_size
    assert f"draft vocabulary: {count} of 64 target tokens" in shown.output


def test_sharded_files_are_read_together_and_those_of_an_index_alone(tmp_path):
    drafter = drafter_of(OFFICIAL)
    directory = write(tmp_path, OFFICIAL, {})
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
    whole = drafter_of(WHOLE)
    tensors = whole.state_dict()
    assert not tensors.pop("d2t").any()
    head = tensors.pop("lm_head.weight")
    loaded = FILES.load(write(tmp_path, WHOLE, tensors))
    assert loaded.wants_head and not whole.wants_head
    loaded.share_head(head)
    assert not loaded.wants_head and loaded.lm_head.weight.data_ptr() == head.data_ptr()
    state = torch.randn(3, 32)
    assert torch.equal(loaded.logits(state), whole.logits(state))


def test_fc_with_a_bias(tmp_path):
    """SGLang's trainers may write one, and no key of the config says so."""
    tensors = drafter_of(OFFICIAL).state_dict()
    tensors["fc.bias"] = torch.randn(32)
    loaded = FILES.load(write(tmp_path, OFFICIAL, tensors))
    states = torch.randn(5, 96)
    wanted = states @ tensors["fc.weight"].T + tensors["fc.bias"]
    torch.testing.assert_close(loaded.fuse(states), wanted)


def test_the_factor_of_yarn_is_in_the_norms(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
    raw = PUBLISHED | {"rope_scaling": scaling}
    model = make_model(raw)
    folder = write_dflash(tmp_path / "drafter", model, raw)
    found = drafter_kind("dflash").load_checkpoint_module().load(folder).state_dict()
    for name, its in model.named_parameters():
        factor = 1.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        assert torch.allclose(found[name], factor * its), name


NEWER = {key: value for key, value in PUBLISHED.items() if key != "rope_theta"}
NEWER["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
SCALES = {"logit_scale": 0.8, "final_logit_softcapping": 20.0}
SAME = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}}
BY_TYPE = made.WINDOWS | {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_parameters": SAME}
# Other engines write it there, and count otherwise: vLLM's runner takes its default.
ELSEWHERE = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (OFFICIAL, {"layer_ids": None, "num_features": 3, "head_dim": 8, "rope_theta": 10000.0}),
        (
            OFFICIAL | {"eagle_aux_hidden_state_layer_ids": [2, 3]},
            {"layer_ids": (2, 3), "num_features": 2},
        ),
        (OFFICIAL | ELSEWHERE, {"layer_ids": None, "num_features": 3}),
        (
            OFFICIAL | ELSEWHERE | {"eagle_aux_hidden_state_layer_ids": [2, 3]},
            {"layer_ids": (2, 3)},
        ),
        (OFFICIAL | {"eagle_config": {"layer_ids": [1, 5, 9]}}, {"layer_ids": (1, 5, 9)}),
        (
            OFFICIAL | {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        (
            OFFICIAL | {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
            {"norm_before_fc": True, "norm_before_residual": False},
        ),
        (OFFICIAL | {"architectures": ["Eagle3Qwen3ForCausalLM"]}, {"head_dim": 128}),
        # DFlash's name the last layer that was run, counted from 0.
        (PUBLISHED, {"layer_ids": (2, 4, 6), "masks": 4, "mask_token_id": 60, "rope_theta": 1e6}),
        (NEWER, {"rope_theta": 5e5}),
        (BY_TYPE, {"rope_theta": 5e5, "rope_scaling": None, "rotary_dim": 4}),
        # vLLM does not read DFlash2's `logit_scale`.
        (made.DFLASH2 | {"logit_scale": 3.0}, SCALES),
        (
            speculators("qwen3", {"fc_norm": True, "draft_vocab_size": 9}, norm_before_fc=True),
            {"fc_norm": False, "norm_before_fc": True, "draft_vocab_size": 40},
        ),
        (PUBLISHED | {"dflash_config": OWN | {"block_size": 9}}, {"masks": 8}),
    ],
)
def test_what_config_json_says(raw, wanted):
    from_json = dflash.from_json if "dflash_config" in raw else eagle3.from_json
    config = from_json(raw, "config.json")
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_published_drafters_by_their_numbers():
    """By what their config.json holds; tensors without memory."""
    both = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    llama = {"intermediate_size": 14336, "vocab_size": 128256, "draft_vocab_size": 32000}
    raw = OFFICIAL | both | llama  # EAGLE3-LLaMA3.1-Instruct-8B
    shapes = wanted_shapes(lambda: Eagle3Model(eagle3.from_json(raw, "config.json")))
    assert shapes["midlayer.self_attn.k_proj.weight"] == (1024, 8192)
    assert shapes["fc.weight"] == (4096, 3 * 4096)
    assert sum(map(prod, shapes.values())) == 424_721_664
    own = {"causal_head": True, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    qwen = {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    layers |= {"num_target_layers": 36}
    # For Qwen3-8B, with the sizes of its target's layers.
    raw = JETSPEC | both | qwen | layers | {"block_size": 16, "dflash_config": own}
    config = dflash.from_json(raw, "config.json")
    shapes = wanted_shapes(lambda: DFlashModel(config))
    assert shapes.pop("d2t") == (151936,)  # which no file holds
    assert sum(map(prod, shapes.values())) == 1_048_626_432
    assert shapes["fc.weight"] == (4096, 5 * 4096) and config.masks == 15


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (PUBLISHED | {"dflash_config": OWN | {"causal_head": True}}, "jetspec"),
        (PUBLISHED | {"dflash_config": OWN | {"causal": True}}, "jetspec"),
        (PUBLISHED | {"dflash_config": OWN | {"causal_head": True, "causal": True}}, "jetspec"),
        (PUBLISHED | {"is_causal": True}, "jetspec"),
        (JETSPEC | {"dflash_config": OWN}, "dflash"),
        (WHOLE | {"architectures": ["LlamaForCausalLM"]}, "specblock"),
    ],
    ids=["authors", "vllm", "both", "flat", "not causal", "no draft vocabulary"],
)
def test_a_config_tells_its_kind(raw, kind, tmp_path):
    assert kind_of(write(tmp_path, raw, {})) == kind
    assert kind == "specblock" or dflash.from_json(raw, "").causal is (kind == "jetspec")
