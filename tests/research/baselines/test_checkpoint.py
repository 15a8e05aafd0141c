"""Folders of the baselines: what is in them, and the sentence for what should be and is not."""

from __future__ import annotations

import json

import pytest
import torch
from baselines.checkpoint import FILES
from baselines.eagle3 import Eagle3
from baselines.falcon import Falcon
from baselines.medusa import Medusa
from baselines.parallelspec import ParallelSpec
from safetensors.torch import load_file
from support.baseline_batches import DRAFT_VOCAB, TARGET_CONFIG, VOCAB, vocabulary
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.eagle3.model import FILES as EAGLE3

MAKE = {
    "medusa": (Medusa, {}),
    "parallelspec": (ParallelSpec, {"layer_ids": (1, 3, 5)}),
    "falcon": (Falcon, {}),
}


def saved(kind: str, folder):
    make, sizes = MAKE[kind]
    d2t, t2d, _ = vocabulary()
    learner = make.for_target(TARGET_CONFIG, d2t, t2d, 0, **sizes)
    learner.save(folder)
    return learner


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_saved_is_found_and_loaded(kind, tmp_path):
    learner = saved(kind, tmp_path)
    assert kind_of(tmp_path) == kind
    config = FILES.read_config(tmp_path)
    assert config == learner.config
    FILES.check_tensors(tmp_path, config)
    drafter = FILES.load(tmp_path, torch.bfloat16)
    found = dict(drafter.named_parameters())
    assert found.keys() == dict(learner.named_parameters()).keys()
    for name, weight in learner.named_parameters():
        assert torch.equal(found[name], weight.bfloat16()), name
    assert torch.equal(drafter.d2t, learner.d2t)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert f"draft vocabulary: {DRAFT_VOCAB} of {VOCAB} target tokens" in shown.output


def test_eagle3_is_saved_as_vllm_reads_it(tmp_path):
    d2t, t2d, named = vocabulary()
    learner, folder = Eagle3.for_target(TARGET_CONFIG, d2t, t2d, 0), tmp_path / "out"
    learner.save(folder)
    learner.save(folder)  # what is there is replaced
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    stored = load_file(folder / "model.safetensors")
    assert (torch.arange(DRAFT_VOCAB) + stored["d2t"]).tolist() == named
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["rope_theta"] == 10000.0
    loaded = EAGLE3.load(folder)
    assert loaded.config == learner.config
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, learner.state_dict()[name].bfloat16().to(weight.dtype)), name


def test_eagle3_that_names_every_token_is_saved_without_a_mapping(tmp_path):
    everything = torch.ones(VOCAB, dtype=torch.bool)
    d2t = torch.zeros(VOCAB, dtype=torch.int64)
    Eagle3.for_target(TARGET_CONFIG, d2t, everything, 0).save(tmp_path)
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    assert EAGLE3.load(tmp_path).d2t.tolist() == [0] * VOCAB


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("medusa", {"specblock_head": "medusa2"}, "must be one of medusa, parallelspec, falcon"),
        ("medusa", {"num_heads": None}, "lacks the key 'num_heads'"),
        ("medusa", {"num_layers": 2}, "lacks blocks.0.layers.1.weight"),
        ("parallelspec", {"intermediate_size": 80}, "but its config.json asks for"),
        ("falcon", {"block_size": 3}, "has 'block_size' = 3, but it must be 1, 2, 4, 8 or 16"),
        ("falcon", {"hidden_size": 30}, "lm_head.weight has shape"),
    ],
)
def test_a_config_that_does_not_fit(kind, changes, sentence, tmp_path):
    saved(kind, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError) as error:
        FILES.check_tensors(tmp_path, FILES.read_config(tmp_path))
    assert sentence in str(error.value) and str(error.value).endswith(".")


def test_a_vocabulary_that_is_none(tmp_path):
    saved("medusa", tmp_path)
    config = FILES.read_config(tmp_path)
    mapping = torch.load(tmp_path / "vocab_mapping.pt")
    torch.save(mapping | {"d2t": mapping["d2t"] + 1}, tmp_path / "vocab_mapping.pt")
    with pytest.raises(CheckpointError, match="that t2d marks"):
        FILES.check_tensors(tmp_path, config)
    (tmp_path / "vocab_mapping.pt").unlink()
    with pytest.raises(CheckpointError, match="says nowhere which they are"):
        FILES.check_tensors(tmp_path, config)
