"""Drafter directories: both layouts, what survives a conversion, and every refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.targets import edit_config, write_target
from support.validation import refusal

from vllm_specblock.drafters.common.config import CheckpointError, default_layer_ids
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.config import TargetInfo
from vllm_specblock.train.untrained import init

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(params=["llama", "qwen"])
def published(request, tmp_path) -> Path:
    """A writable copy of a fixture drafter, in the published layout."""
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / "published"))


@pytest.fixture
def llama(tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURES / "llama", tmp_path / "llama"))


@pytest.fixture
def ours(llama, tmp_path) -> Path:
    checkpoint.convert(llama, tmp_path / "ours", "ours")
    return tmp_path / "ours"


@pytest.fixture
def target(tmp_path) -> Path:
    return write_target(tmp_path / "target")


def edit_tensors(directory: Path, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def refused(directory: Path) -> str:
    return refusal(checkpoint, directory)


def test_published_config(published):
    config = checkpoint.read_config(published)
    raw = json.loads((published / "config.json").read_text())
    assert config.block_size == raw["diffspec_draft_token_num"] == 4
    assert config.rope_theta == raw["rope_theta"]
    assert config.rms_norm_eps == raw["rms_norm_eps"]
    assert config.draft_vocab_size == raw["draft_vocab_size"]
    assert (config.rank_topk, config.qk_norm, config.block_rope) == (20, False, "base")
    assert config.target.layer_ids is None
    assert config.target.hidden_size == config.target_hidden_size == raw["hidden_size"]


def test_defaults_of_keys_that_a_published_config_may_lack(llama):
    absent = (
        "num_key_value_heads",
        "rms_norm_eps",
        "draft_vocab_size",
        "rope_theta",
        "rope_scaling",
        "diffspec_draft_token_num",
        "rank_classes",
    )
    edit_config(llama, vocab_size=128256, **dict.fromkeys(absent, ...))
    config = checkpoint.read_config(llama)
    assert config.num_key_value_heads == 4
    assert config.rms_norm_eps == 1e-5
    assert config.draft_vocab_size == 32000
    assert config.rope_theta == 10000
    assert (config.block_size, config.rank_classes) == (4, 4)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"head_dim": 128}, {"head_dim": 16}),
        # Where transformers 5 puts it.
        (
            {
                "rope_theta": ...,
                "rope_scaling": ...,
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            },
            {"rope_theta": 1e6, "rope_scaling": None},
        ),
    ],
    ids=["a head_dim that the authors' code ignores", "rope_parameters"],
)
def test_keys_of_a_published_config(llama, changes, wanted):
    edit_config(llama, **changes)
    config = checkpoint.read_config(llama)
    assert {name: getattr(config, name) for name in wanted} == wanted
    checkpoint.load(llama)


def test_load_gives_the_stored_weights(published):
    stored = load_file(published / "model.safetensors")
    assert_same_tensors(dict(checkpoint.load(published).state_dict()), stored)


@pytest.mark.parametrize("layout", ["llama", "ours"])
def test_vocab_mapping_pt_wins_in_the_published_layout_alone(request, layout):
    folder = request.getfixturevalue(layout)
    t2d = torch.zeros(160, dtype=torch.bool)
    t2d[32:128] = True
    torch.save({"d2t": torch.full((96,), 32), "t2d": t2d}, folder / "vocab_mapping.pt")
    drafter = checkpoint.load(folder)
    targets = drafter.target_ids(torch.arange(96))
    assert torch.equal(drafter.t2d, t2d) == (layout == "llama")
    assert torch.equal(targets, torch.arange(32, 128)) == (layout == "llama")
    checkpoint.convert(folder, folder.parent / "converted", "ours")
    assert torch.equal(checkpoint.load(folder.parent / "converted").d2t, drafter.d2t)


def test_mapping_inside_the_safetensors_file_is_enough(llama):
    before = checkpoint.load(llama).d2t
    (llama / "vocab_mapping.pt").unlink()
    assert torch.equal(checkpoint.load(llama).d2t, before)


def test_full_draft_vocabulary_needs_no_mapping(llama):
    def widen(tensors):
        tensors["lm_head.weight"] = torch.randn(160, 64)
        del tensors["d2t"], tensors["t2d"]

    edit_tensors(llama, widen)
    edit_config(llama, draft_vocab_size=160)
    (llama / "vocab_mapping.pt").unlink()
    drafter = checkpoint.load(llama)
    assert torch.equal(drafter.target_ids(torch.arange(160)), torch.arange(160))


def test_convert_there_and_back_loses_nothing(published, tmp_path):
    checkpoint.convert(published, tmp_path / "ours", "ours")
    checkpoint.convert(tmp_path / "ours", tmp_path / "back", "published")
    config = checkpoint.read_config(published)
    for directory in (tmp_path / "ours", tmp_path / "back"):
        assert checkpoint.read_config(directory) == config
        stored = load_file(directory / "model.safetensors")
        assert_same_tensors(stored, load_file(published / "model.safetensors"))
    mapping = torch.load(tmp_path / "back" / "vocab_mapping.pt", weights_only=True)
    assert_same_tensors(mapping, torch.load(published / "vocab_mapping.pt", weights_only=True))
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {"config.json", "model.safetensors"}


INFO = TargetInfo(
    name="org/target",
    architectures=("LlamaForCausalLM",),
    hidden_size=64,
    vocab_size=160,
    layer_ids=(2, 4, 6),
)


def test_published_config_names_what_the_authors_code_reads(llama, tmp_path):
    checkpoint.convert(llama, tmp_path / "ours", "ours", INFO)
    checkpoint.convert(tmp_path / "ours", tmp_path / "back", "published")
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMSpecBlock"]
    assert raw["diffspec_draft_token_num"] == 4
    assert raw["rank_classes"] == 4
    assert raw["target_hidden_size"] == 64
    assert raw["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    assert checkpoint.read_config(tmp_path / "back").target.layer_ids == (2, 4, 6)


def test_convert_writes_down_a_target(llama, tmp_path):
    checkpoint.convert(llama, tmp_path / "ours", "ours", INFO)
    assert checkpoint.read_config(tmp_path / "ours").target == INFO
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    verifier = raw["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}


def test_save_and_load_ours(target, tmp_path):
    target = write_target(target, model_type="qwen3", head_dim=32)
    drafter = init(target, block_size=3, num_layers=3, draft_vocab_size=100)
    checkpoint.save(drafter, tmp_path / "out")
    loaded = checkpoint.load(tmp_path / "out")
    assert loaded.config == drafter.config
    assert_same_tensors(dict(loaded.state_dict()), dict(drafter.state_dict()))


def test_saved_weights_are_readable_like_any_new_file(ours, tmp_path):
    (tmp_path / "any").touch()
    for name in ("config.json", "model.safetensors"):
        assert (ours / name).stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"qk_norm": True}, "qk_norm"),
        ({"rank_topk": "full"}, "rank_topk"),
        ({"block_rope": "path"}, "block_rope"),
        ({"head_dim": 32}, "head_dim"),
        ({"prefix_broadcast": False}, "prefix_broadcast"),
        ({"layer_shift": False}, "layer_shift"),
    ],
)
def test_published_layout_refuses_what_it_cannot_hold(target, tmp_path, changes, what):
    drafter = init(target)
    drafter.config = drafter.config.model_copy(update=changes)
    with pytest.raises(CheckpointError, match=f"cannot hold a drafter whose {what} is"):
        checkpoint.save(drafter, tmp_path / "out", layout="published")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "changes", "said"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), {}, "lacks layers.1.mlp.up_proj.weight"),
        (None, {"num_hidden_layers": 4}, "and 15 more"),
        (lambda t: t.update({"layers.2.bogus": torch.zeros(1)}), {}, "holds layers.2.bogus"),
        (
            None,
            {"intermediate_size": 128},
            "has shape [96, 64], but its config.json asks for [128, 64]",
        ),
        (
            None,
            {"diffspec_draft_token_num": 5},
            "position_queries.weight has shape [4, 64], but its config.json asks for [5, 64]",
        ),
    ],
)
def test_tensors_that_the_config_does_not_ask_for(llama, edit, changes, said):
    if edit is not None:
        edit_tensors(llama, edit)
    edit_config(llama, **changes)
    assert said in refused(llama)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLMEagle3"], None])
def test_unknown_architecture(llama, architectures):
    edit_config(llama, architectures=architectures)
    message = refused(llama)
    assert "LlamaForCausalLMSpecBlock" in message and "SpecBlockDrafter" in message


def test_missing_files(llama, tmp_path):
    assert "There is no directory" in refused(tmp_path / "org" / "drafter")
    (llama / "model.safetensors").unlink()
    assert "model.safetensors" in refused(llama)
    (llama / "config.json").unlink()
    assert "There is no config.json" in refused(llama)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "must be one of default, linear, llama3"),
        ({"type": "linear"}, "factor = None"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor = None"),
    ],
)
def test_unsupported_rope_scaling(llama, scaling, said):
    edit_config(llama, rope_scaling=scaling)
    assert said in refused(llama)


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("d2t", lambda d2t: d2t[:-1], "d2t has shape [95]"),
        ("d2t", lambda d2t: d2t + torch.arange(96), "d2t holds offsets, not ids"),
        ("t2d", lambda t2d: ~t2d, "that t2d marks"),
    ],
    ids=["another size", "ids in place of offsets", "other tokens"],
)
def test_a_mapping_that_does_not_fit(llama, name, edit, said):
    mapping = torch.load(llama / "vocab_mapping.pt", weights_only=True)
    torch.save(mapping | {name: edit(mapping[name])}, llama / "vocab_mapping.pt")
    assert said in refused(llama)


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("llama", {"hidden_size": ...}, "lacks the key 'hidden_size'"),
        ("llama", {"num_attention_heads": 5}, "must be a whole multiple of the second"),
        ("llama", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, 3"),
        ("llama", {"draft_vocab_size": 161}, "must not exceed vocab_size, 160"),
        ("llama", {"diffspec_draft_token_num": 0}, "'block_size' = 0, but it must be greater than"),
        (
            "llama",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}},
            "[2, 2, 5] are read, but they must be different ones in ascending order",
        ),
        ("ours", {"block_size": ...}, "lacks the key 'block_size'"),
        ("ours", {"block_sise": 4}, "has the key 'block_sise', which is not one of"),
        ("ours", {"rank_topk": "some"}, "'rank_topk"),
        ("ours", {"block_rope": "depth"}, "it must be 'base' or 'path'"),
        ("ours", {"vocab_size": 161}, "vocab_size is 161, but the target's is 160"),
    ],
)
def test_config_out_of_range(request, layout, changes, said):
    folder = request.getfixturevalue(layout)
    edit_config(folder, **changes)
    assert said in refused(folder)


@pytest.mark.parametrize(("layers", "ids"), [(7, (2, 3, 4)), (32, (2, 16, 29)), (36, (2, 18, 33))])
def test_default_layer_ids(layers, ids):
    assert default_layer_ids(layers) == ids
