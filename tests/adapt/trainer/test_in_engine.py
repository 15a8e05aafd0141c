"""The trainer inside the engine learns what one beside it learns, and only when it may."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.adapting import Pair

from vllm_specblock.adapt.learning import judge as judge_module
from vllm_specblock.adapt.learning import trunk_states
from vllm_specblock.adapt.link.layout import COUNTS
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.trainer.in_engine import WAITING, EngineTrainer
from vllm_specblock.adapt.trainer.trainer import TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.specblock import checkpoint

from .test_trainer import Both


@pytest.fixture
def pair(tmp_path) -> Pair:
    return Pair.make(tmp_path)


def config(pair: Pair, **more) -> TrainerConfig:
    given = {"policy": "always", "actions": "heads", "lr": 3e-3, "every": 4, "batch": 2, **more}
    return TrainerConfig(str(pair.drafter), str(pair.target), **given)


@pytest.fixture
def inside(pair):
    made = EngineTrainer(config(pair), share=1e9)
    yield made
    made.close()


def learn(inside: EngineTrainer) -> int:
    """Slices until nothing waits, as the steps of a long stream grant them."""
    slices = 1
    while inside._waiting or inside.trainer.adaptation.requests < learn.requests:
        inside.slice()
        slices += 1
        assert slices < 10_000 and inside.slices.error is None
    for _ in range(200):  # the last request's own pieces
        inside.slice()
    return slices


def serve(inside: EngineTrainer, pair: Pair, numbers: range) -> list:
    """Finish requests one by one, as an engine does, inside inference mode."""
    taken = []
    for number in numbers:
        with torch.inference_mode():
            record, finished = pair.request(number)
            assert inside.offer(record, finished)
            learn.requests = number + 1
            learn(inside)
            if (found := inside.staged()) is not None:
                inside.took(found, 0.001)
                taken.append(found)
    return taken


def test_it_learns_what_a_trainer_beside_the_engine_does(inside, pair):
    other = Both(pair, actions="heads", every=4, batch=2)
    beside, here = other.serve(range(12)), serve(inside, pair, range(12))
    assert [each.number for each in here] == [each.number for each in beside] == [1, 2, 3]
    for mine, theirs in zip(here, beside):
        assert mine.action is theirs.action is Action.HEADS
        assert mine.tensors.keys() == theirs.tensors.keys()
        for name, tensor in mine.tensors.items():
            torch.testing.assert_close(tensor, theirs.tensors[name])
    assert inside.counts.keys() == set(COUNTS)
    assert inside.counts["updates_heads"] == inside.counts["swaps"] == 3
    assert inside.counts["versions_offered"] == 3 and inside.counts["swap_microseconds"] == 3000


def test_layers_run_once_over_a_text_that_versions_are_judged_on(pair, monkeypatch):
    judged = {"policy": "gain", "lr": 1e-2}
    inside = EngineTrainer(config(pair, **judged), share=1e9)
    judge, runs = inside.trainer.adaptation.judge, Counter()
    real, plain = trunk_states.states_along, []
    monkeypatch.setattr(
        trunk_states,
        "states_along",
        lambda drafter, text, blocks: (
            runs.update([tuple(text.hidden[:, 0].tolist())]) or real(drafter, text, blocks)
        ),
    )
    monkeypatch.setattr(judge_module, "depth_along", lambda *given: plain.append(1))
    assert serve(inside, pair, range(24))
    depths = sum(len(known) for known in judge._known.values())
    assert runs and set(runs.values()) == {1} and not plain and depths >= 2 * len(runs)
    inside.close()


def test_a_slice_is_a_piece_of_an_update(inside, pair, monkeypatch):
    """Of four requests, the judged aside, each batch has one new record, and is a slice."""
    updater, learned = inside.trainer.adaptation.updater, []
    real = updater._learn
    monkeypatch.setattr(updater, "_learn", lambda *given: learned.append(1) or real(*given))
    for number in range(4):
        assert inside.offer(*pair.request(number))
    batches = []
    while not inside.counts["updates_heads"]:
        inside.slice()
        batches.append(len(learned))
        assert len(batches) < 100
    new = sum(not pair.record(number).judged for number in range(4))
    assert new > 1 and [*dict.fromkeys(batches)][-new:] == list(range(1, new + 1))


def test_without_an_account_nothing_is_learned(pair):
    inside = EngineTrainer(config(pair), share=0.0)
    inside.slices._account = -1.0
    for number in range(WAITING):
        assert inside.offer(*pair.request(number))
        inside.slice()
    assert not inside.offer(*pair.request(WAITING)), "there is no more room"
    assert inside.staged() is None and not any(inside.counts.values())
    inside.close()


def test_a_failure_ends_learning_alone(inside, pair, monkeypatch):
    def fails(*_) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(inside.trainer.adaptation, "finish", fails)
    assert inside.offer(*pair.request(0))
    for _ in range(3):
        inside.slice()
    assert str(inside.slices.error) == "out of memory"
    assert not inside.offer(*pair.request(1)) and inside.staged() is None


def test_what_serving_lost_is_asked_once(inside, pair):
    served = serve(inside, pair, range(4))
    assert served
    lost = inside.swap_seconds(Action.HEADS)
    assert lost > 0.001 and inside.swap_seconds(Action.HEADS) == 0.0


def test_versions_are_written_and_gone_on_from(pair, tmp_path):
    out = str(tmp_path / "versions")
    first = EngineTrainer(config(pair, out=out), share=1e9)
    (*_, last) = serve(first, pair, range(8))
    first.close()
    folder = VersionFolder(tmp_path / "versions", pair.drafter, pair.target)
    current, sentence = folder.current()
    assert sentence is None and current is not None
    written = dict(checkpoint.load(current, torch.float32).named_parameters())
    for name, tensor in last.tensors.items():
        torch.testing.assert_close(written[name].detach(), tensor, rtol=0.01, atol=0.01)
    second = EngineTrainer(config(pair, out=out), share=1e9)
    found = second.staged()
    assert found is not None and found.action is Action.FULL and found.number > 0
    for name, tensor in last.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0.01, atol=0.01)
    assert second.staged() is None
    second.close()
