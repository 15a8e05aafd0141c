"""What a run logs, against sums done by hand; and whom it tells."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.learner import LossOutput
from vllm_specblock.train.metrics_log import MetricsLog, Tracker, describe

CPU = torch.device("cpu")


def outcome(ce_loss, hits, seen, rank=0.0, num_positions=None) -> LossOutput:
    grids = [torch.tensor(grid, dtype=torch.float32) for grid in (ce_loss, hits, seen)]
    num_positions = None if num_positions is None else torch.tensor(num_positions)
    return LossOutput(torch.tensor(0.0), *grids, torch.tensor(rank), num_positions)


FIRST = outcome(
    ce_loss=[[8.0, 6.0], [2.0, 0.0]], hits=[[4, 1], [1, 0]], seen=[[8, 4], [2, 1]], rank=1.0
)
SECOND = outcome(
    ce_loss=[[4.0, 0.0], [0.0, 0.0]], hits=[[2, 2], [0, 0]], seen=[[4, 2], [0, 0]], rank=2.0
)


@pytest.fixture
def metrics_log() -> MetricsLog:
    metrics_log = MetricsLog()
    metrics_log.add(FIRST)
    metrics_log.add(SECOND)
    return metrics_log


def test_means_are_over_positions_not_over_batches(metrics_log):
    entry = metrics_log.entry(step=7)
    assert entry["step"] == 7
    assert entry["loss"] == [[1.0, 1.0], [1.0, 0.0]]  # 12 / 12, 6 / 6, 2 / 2, nothing
    assert entry["alpha"] == [[0.5, 0.5], [0.5, 0.0]]  # 6 / 12, 3 / 6, 1 / 2, 0 / 1
    assert entry["accuracy"] == [[0.5, 0.25], [0.5, 0.0]]  # of 12 paths, of 2 paths
    assert entry["rank_loss"] == 1.5


def test_an_entry_begins_anew(metrics_log):
    metrics_log.entry(step=1)
    metrics_log.add(SECOND)
    assert metrics_log.entry(step=2)["alpha"] == [[0.5, 1.0], [0.0, 0.0]]
    assert [entry["step"] for entry in metrics_log.entries] == [1, 2]


def test_losses_may_count_other_positions_than_paths():
    metrics_log = MetricsLog()
    metrics_log.add(outcome([[6.0]], [[1]], [[2]], num_positions=[[12]]))
    entry = metrics_log.entry()
    assert (entry["loss"], entry["alpha"]) == ([[0.5]], [[0.5]])


def test_a_state_in_the_middle_of_an_interval_goes_on(metrics_log):
    halfway = MetricsLog()
    halfway.entries.append({"step": 0})
    halfway.add(FIRST)
    again = MetricsLog()
    again.load_state(halfway.state(), CPU)
    again.add(SECOND)
    assert again.entry(step=7) == metrics_log.entry(step=7)
    assert [entry["step"] for entry in again.entries] == [0, 7]


def test_a_state_right_after_an_entry_goes_on(metrics_log):
    metrics_log.entry(step=1)
    again = MetricsLog()
    again.load_state(metrics_log.state(), CPU)
    assert again.entries == metrics_log.entries and again.grid is None


def test_what_is_added_later_does_not_reach_a_state(metrics_log):
    """The state is written after it is taken: it must not be the running sum itself."""
    state = metrics_log.state()
    before = state["grid"].clone()
    metrics_log.add(FIRST)
    assert torch.equal(state["grid"], before)


def test_a_state_holds_nothing_but_tensors_and_words(metrics_log, tmp_path):
    metrics_log.entry(step=1)
    torch.save(metrics_log.state(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True).keys() == metrics_log.state().keys()


def test_a_line_each(metrics_log, tmp_path):
    metrics_log.entry(step=1)
    metrics_log.entries.append({"step": 1, "tau": 2.5})
    metrics_log.write(tmp_path / "log.jsonl")
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == metrics_log.entries
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_the_progress_bar_shows_each_block(metrics_log):
    assert describe(metrics_log.entry(step=1)) == "nats 1.00 rank 1.50 α% 50 50 | 50 0"


class TestTracker:
    """Neither package need be installed: what is asked of them is written down by stand-ins."""

    @pytest.mark.parametrize(
        ("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
    )
    def test_what_is_not_installed_is_one_sentence(self, kind, module, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, module, None)  # importing it is an ImportError now
        with pytest.raises(TrainError) as error:
            Tracker(kind, tmp_path, {})
        assert str(error.value) == (
            f"--track {kind} needs the package {kind}, which is not installed: pip install {kind}."
        )

    def test_nobody_is_told_by_default(self, metrics_log, tmp_path, monkeypatch):
        for module in ("torch.utils.tensorboard", "wandb"):
            monkeypatch.setitem(sys.modules, module, None)
        Tracker("none", tmp_path, {}).log("drafter", metrics_log.entry(step=1))
        assert not list(tmp_path.iterdir())

    def test_wandb_gets_numbers_at_their_step(self, metrics_log, tmp_path, monkeypatch):
        told = []
        run = types.SimpleNamespace(log=lambda numbers, step: told.append((step, numbers)))
        started = {}

        def init(**options):
            started.update(options)
            return run

        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
        tracker = Tracker("wandb", tmp_path, {"lr": 1.0})
        tracker.log("drafter", metrics_log.entry(step=7))
        tracker.log("drafter", {"step": 8, "tau": 2.5})
        assert started["config"] == {"lr": 1.0} and started["dir"] == str(tmp_path)
        (first, numbers), (second, tau) = told
        assert (first, second) == (7, 8)
        assert numbers["drafter/loss/0/1"] == 1.0 and numbers["drafter/alpha/1/0"] == 0.5
        assert tau["drafter/tau"] == 2.5

    def test_tensorboard_gets_numbers_at_their_step(self, metrics_log, tmp_path, monkeypatch):
        told = {}

        class SummaryWriter:
            def __init__(self, folder):
                told["folder"] = folder

            def add_scalar(self, name, value, step):
                told[name, step] = value

            def flush(self):
                told["flushed"] = len(told)

        module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        tracker = Tracker("tensorboard", tmp_path, {})
        tracker.log("drafter", metrics_log.entry(step=7))
        assert told["folder"] == str(tmp_path / "tensorboard")
        assert told["drafter/accuracy/0/1", 7] == 0.25
        assert told["drafter/rank_loss", 7] == 1.5
        assert told["flushed"] > 10  # a kill loses no line that the log has

    def test_tensorboard_itself_writes_event_files(self, metrics_log, tmp_path):
        pytest.importorskip("tensorboard")
        Tracker("tensorboard", tmp_path, {}).log("drafter", metrics_log.entry(step=7))
        (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
        assert events.stat().st_size > 100
