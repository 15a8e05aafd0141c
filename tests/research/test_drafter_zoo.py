"""Who takes part in the controlled comparison, and what its table says of them."""

from __future__ import annotations

import drafter_zoo
import pytest
import torch
from comparison import Comparison
from support.training import write_pair

from vllm_specblock.train.config import TrainError, parse
from vllm_specblock.train.run import prepare


@pytest.fixture(scope="module")
def footing(tmp_path_factory):
    """What a comparison's drafters are made for."""
    folder = write_pair(tmp_path_factory.mktemp("pair"))
    config = parse(
        Comparison,
        target=folder / "target",
        data=folder / "d.safetensors",
        out=folder / "out",
        prompts=folder / "none.jsonl",
        draft_vocab_size=20,
        length=24,
        loss_floor=0.5,
        precision="fp32",
        device="cpu",
    )
    return drafter_zoo.Footing(config, prepare(config, torch.device("cpu"), 6))


@pytest.mark.parametrize("name", drafter_zoo.EVERYONE)
def test_every_drafter_is_made_of_about_one_size(footing, name):
    wanted = drafter_zoo.parameters(drafter_zoo.make("specblock", footing))
    made = drafter_zoo.parameters(drafter_zoo.make(name, footing))
    assert name in drafter_zoo.ABLATIONS or made == pytest.approx(wanted, rel=0.5)


def test_an_unknown_drafter_is_one_sentence(footing):
    with pytest.raises(TrainError, match=r"'unknown'; there are specblock, .*, EAGLE-3, "):
        drafter_zoo.make("unknown", footing)
