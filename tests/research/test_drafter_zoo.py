"""Who takes part in the controlled comparison, and what its table says of them."""

from __future__ import annotations

from types import SimpleNamespace

import drafter_zoo
import pytest
import torch
from comparison import PAPER, UNIFORM, Comparison, begin_as, contestants, footing, table
from support.training import write_pair

from vllm_specblock.train.config import TrainError, parse
from vllm_specblock.train.run import prepare


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """A comparison's options, and what its drafters are made for."""
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
    return config, footing(config, prepare(config, torch.device("cpu"), 6))


def test_everybody_has_a_name_that_a_file_can_have():
    names = (*drafter_zoo.EVERYONE, *drafter_zoo.STUDIES)
    assert len(set(names)) == len(names) and not [name for name in names if "/" in name]


def test_studies_change_what_they_say(common):
    _, run_context = common
    plain = drafter_zoo.make("specblock", run_context)
    studies = {name: drafter_zoo.make(name, run_context) for name in drafter_zoo.STUDIES}
    assert plain.recipe.loss_floor == 0.5
    floors = [studies[f"loss floor {floor}"].recipe.loss_floor for floor in ("0", "0.25", "1")]
    assert floors == [0.0, 0.25, 1.0]
    assert torch.equal(plain.drafter.lm_head.weight, run_context.folded)
    with pytest.raises(TrainError, match=r"there are specblock, .*, loss floor 0, "):
        drafter_zoo.make("nobody", run_context)


def test_drafters_of_another_run_learn_on(common, tmp_path):
    _, run_context = common
    names = ["specblock", "Medusa"]
    learned = {name: drafter_zoo.make(name, run_context) for name in names}
    for learner in learned.values():
        for weight in learner.parameters():
            weight.data.add_(1.0)
    (tmp_path / "training").mkdir()
    torch.save(
        {"students": {name: {"model": each.state_dict()} for name, each in learned.items()}},
        tmp_path / "training/state.pt",
    )
    again = {name: drafter_zoo.make(name, run_context) for name in names}
    begin_as(again, tmp_path)
    for name in names:
        for key, value in learned[name].state_dict().items():
            assert torch.equal(again[name].state_dict()[key], value)
    with pytest.raises(TrainError, match="holds specblock, Medusa, and no EAGLE-3"):
        begin_as({"EAGLE-3": drafter_zoo.make("EAGLE-3", run_context)}, tmp_path)
    with pytest.raises(TrainError, match=r"There is no .*: --after wants"):
        begin_as(again, tmp_path / "nowhere")


def test_other_trees_are_shown_with_their_drafter(common):
    config, run_context = common
    learner = drafter_zoo.make("specblock", run_context)
    train_states = {"specblock": SimpleNamespace(learner=learner)}
    names = list(contestants(config, SimpleNamespace(train_states=train_states)))
    assert {f"{UNIFORM}, width {n}" for n in (3, 8, 16, 32)} < set(names)
    assert {"specblock", UNIFORM, PAPER} < set(names)
    summary = {
        "results": {f"{name} T=0": {"tau": 2.0, "error": 0.1} for name in names},
        "alpha": {"specblock": [[0.5]]},
        "parameters": {"specblock": 2e6},
        "loss_floor": {"specblock": 0.5},
    }
    rows = table(summary).splitlines()[2:]
    assert len(rows) == len(names)
    assert all("| 2.00 | 0.5 | 2 | 2.00 ± 0.10 | – | 0.50 |" in row for row in rows)
