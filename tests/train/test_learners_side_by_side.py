"""Several learners in one run: each as if it were alone, the target asked once for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.training import equal, history, short_run
from torch import nn

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.learner import Learner, LossOutput
from vllm_specblock.train.loop import Trainer
from vllm_specblock.train.run import make_teacher, new_drafter, prepare, recipe, sequences_of
from vllm_specblock.train.specblock import SpecBlockLearner

CPU = torch.device("cpu")
RECIPES = {
    "first": {},
    "free": {"valid_prefix": False, "rank_from": 0},
    "deep": {"num_blocks": 3, "mask_restart": True, "loss_floor": 0.0},
}


@pytest.fixture(scope="module")
def make(folder, tmp_path_factory):
    """A trainer of some of `RECIPES` and of `others`."""
    runs = tmp_path_factory.mktemp("runs")

    def make(*names: str, out: str, others: dict | None = None) -> Trainer:
        changes = {"micro_batch": 2, "lr": 3e-3, "save_every": 2, "log_every": 3}
        config = short_run(folder, out=runs / out, hold_out=2, eval_every=3, **changes)
        run_context = prepare(config, CPU, shortest=6)
        learners: dict[str, Learner] = {}
        for name in names:
            drafter = new_drafter(config, run_context).float().train()
            chosen = replace(recipe(config, CPU), **RECIPES[name])
            learners[name] = SpecBlockLearner(drafter, chosen)
        learners |= others or {}
        teacher = make_teacher(config, run_context, new_drafter(config, run_context).t2d, CPU)
        sequences = sequences_of(run_context, teacher, CPU)
        facts = run_context.facts
        return Trainer(config, learners, teacher, run_context.windows, sequences, CPU, facts)

    return make


def learned(trainer: Trainer, name: str) -> dict[str, torch.Tensor]:
    return trainer.train_states[name].learner.state_dict()


def entries(trainer: Trainer, name: str) -> list[dict]:
    """The log of a learner as it lies on disk."""
    log = f"{name}.jsonl" if len(trainer.train_states) > 1 else "log.jsonl"
    return history(trainer.config.out, log)


@pytest.fixture(scope="module")
def together(make) -> Trainer:
    """A run that asks the target once for all learners."""
    trainer = make(*RECIPES, out="together")
    asked = []

    def teach(batch, inner=trainer.teacher.teach):
        asked.append(len(batch))
        return inner(batch)

    trainer.teacher.teach = teach
    trainer.run(progress=False)
    assert asked == [2, 2] * 6  # micro-batches of each update
    return trainer


def test_each_learns_what_it_learns_alone(make, together):
    for name in RECIPES:
        alone = make(name, out=f"alone {name}")
        alone.run(progress=False)
        mine, other = learned(together, name), learned(alone, name)
        assert equal(mine, other), name
        assert entries(together, name) == entries(alone, name)
    heads = [learned(together, name)["drafter.lm_head.weight"] for name in RECIPES]
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_other_learners_do_not_take_over_a_state(make):
    make("first", "free", out="others").save()
    with pytest.raises(TrainError, match="holds first, free, not first, deep"):
        make("first", "deep", out="others").restore()


class Broken(Learner):
    """Its gradient is no number from some update on."""

    def __init__(self, since: int):
        super().__init__()
        self.weight, self.since = nn.Parameter(torch.ones(3)), since

    def forward(self, train_batch):
        loss = self.weight.sum() * (torch.nan if train_batch.step >= self.since else 1.0)
        grid = torch.ones(1, 1)
        return LossOutput(loss, grid, grid, grid, torch.tensor(0.0))

    def draft_along(self, sequence):
        raise NotImplementedError

    def save(self, directory):
        (directory / "model.safetensors").write_bytes(b"")


def test_a_gradient_that_is_no_number_costs_one_learner_one_update(make):
    trainer = make("first", out="broken", others={"broken": Broken(since=1)})
    alone = make("first", out="alone")
    for _ in range(3):
        trainer.update()
        alone.update()
    broken, first = (trainer.train_states[name] for name in ("broken", "first"))
    assert broken.lost == 2 and first.lost == 0
    assert bool(broken.learner.weight.isfinite().all())
    assert equal(learned(trainer, "first"), learned(alone, "first"))
    with pytest.raises(TrainError, match="gradient of broken has not been finite for 20 updates"):
        for _ in range(30):
            trainer.update()
    assert trainer.step == 20
