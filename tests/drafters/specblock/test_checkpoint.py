"""SpecBlock checkpoints: both layouts load, and a conversion keeps what they hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.targets import edit_config, write_target
from support.tensors import assert_equal

from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.config import TargetInfo
from vllm_specblock.train import saving
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
    saving.convert(llama, tmp_path / "ours", "ours")
    return tmp_path / "ours"


def test_a_published_drafter_loads(published):
    config = checkpoint.read_config(published)
    raw = json.loads((published / "config.json").read_text())
    assert config.block_size == raw["diffspec_draft_token_num"] == 4
    assert config.rope_theta == raw["rope_theta"]
    assert config.rms_norm_eps == raw["rms_norm_eps"]
    assert config.draft_vocab_size == raw["draft_vocab_size"]
    assert (config.rank_topk, config.qk_norm, config.block_rope) == (20, False, "base")
    assert config.target.layer_ids is None
    assert config.target.hidden_size == config.target_hidden_size == raw["hidden_size"]
    stored = load_file(published / "model.safetensors")
    assert_equal(checkpoint.load(published).state_dict(), stored)


IN_CODE = ["num_key_value_heads", "rms_norm_eps", "draft_vocab_size", "rope_theta", "rope_scaling"]
IN_CODE += ["diffspec_draft_token_num", "rank_classes"]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {"vocab_size": 128256, **dict.fromkeys(IN_CODE, ...)},
            {
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-5,
                "draft_vocab_size": 32000,
                "rope_theta": 10000,
                "block_size": 4,
                "rank_classes": 4,
            },
        ),
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
    ids=["left to the code", "a head_dim that the authors' code ignores", "rope_parameters"],
)
def test_keys_of_a_published_config(llama, changes, wanted):
    edit_config(llama, **changes)
    config = checkpoint.read_config(llama)
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize("layout", ["llama", "ours"])
def test_vocab_mapping_pt_wins_in_the_published_layout_alone(request, layout):
    folder = request.getfixturevalue(layout)
    t2d = torch.zeros(160, dtype=torch.bool)
    t2d[32:128] = True
    torch.save({"d2t": torch.full((96,), 32), "t2d": t2d}, folder / "vocab_mapping.pt")
    drafter = checkpoint.load(folder)
    targets = torch.arange(96) + drafter.d2t
    assert torch.equal(drafter.t2d, t2d) == (layout == "llama")
    assert torch.equal(targets, torch.arange(32, 128)) == (layout == "llama")
    saving.convert(folder, folder.parent / "converted", "ours")
    assert torch.equal(checkpoint.load(folder.parent / "converted").d2t, drafter.d2t)


def test_mapping_inside_the_safetensors_file_is_enough(llama):
    before = checkpoint.load(llama).d2t
    (llama / "vocab_mapping.pt").unlink()
    assert torch.equal(checkpoint.load(llama).d2t, before)


def test_full_draft_vocabulary_needs_no_mapping(llama):
    tensors = load_file(llama / "model.safetensors") | {"lm_head.weight": torch.randn(160, 64)}
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, llama / "model.safetensors")
    edit_config(llama, draft_vocab_size=160)
    (llama / "vocab_mapping.pt").unlink()
    drafter = checkpoint.load(llama)
    assert torch.equal(torch.arange(160) + drafter.d2t, torch.arange(160))


def test_convert_there_and_back_loses_nothing(published, tmp_path):
    saving.convert(published, tmp_path / "ours", "ours")
    saving.convert(tmp_path / "ours", tmp_path / "back", "published")
    config = checkpoint.read_config(published)
    for directory in (tmp_path / "ours", tmp_path / "back"):
        assert checkpoint.read_config(directory) == config
        stored = load_file(directory / "model.safetensors")
        assert_equal(stored, load_file(published / "model.safetensors"))
    mapping = torch.load(tmp_path / "back" / "vocab_mapping.pt", weights_only=True)
    assert_equal(mapping, torch.load(published / "vocab_mapping.pt", weights_only=True))
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {"config.json", "model.safetensors"}


def test_convert_writes_down_a_target_and_keeps_it(llama, tmp_path):
    """As the authors' code reads it, in the published layout."""
    info = TargetInfo(
        name="org/target",
        architectures=("LlamaForCausalLM",),
        hidden_size=64,
        vocab_size=160,
        layer_ids=(2, 4, 6),
    )
    saving.convert(llama, tmp_path / "ours", "ours", info)
    assert checkpoint.read_config(tmp_path / "ours").target == info
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    verifier = raw["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    saving.convert(tmp_path / "ours", tmp_path / "back", "published")
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    written = {
        "architectures": ["LlamaForCausalLMSpecBlock"],
        "diffspec_draft_token_num": 4,
        "rank_classes": 4,
        "target_hidden_size": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
    }
    assert {key: raw[key] for key in written} == written


def test_a_saved_drafter_loads_and_is_readable_like_any_new_file(tmp_path):
    target = write_target(tmp_path / "target", model_type="qwen3", head_dim=32)
    drafter = init(target, block_size=3, num_layers=3, draft_vocab_size=100)
    saving.save(drafter, tmp_path / "out")
    loaded = checkpoint.load(tmp_path / "out")
    assert loaded.config == drafter.config
    assert_equal(loaded.state_dict(), drafter.state_dict())
    (tmp_path / "any").touch()
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qk_norm", True),
        ("rank_topk", "full"),
        ("block_rope", "path"),
        ("head_dim", 32),
        ("prefix_broadcast", False),
        ("layer_shift", False),
    ],
)
def test_published_layout_refuses_what_it_cannot_hold(tmp_path, key, value):
    drafter = init(write_target(tmp_path / "target"))
    drafter.config = drafter.config.model_copy(update={key: value})
    with pytest.raises(CheckpointError, match=f"cannot hold a drafter whose {key} is"):
        saving.save(drafter, tmp_path / "out", layout="published")
    assert not (tmp_path / "out").exists()
