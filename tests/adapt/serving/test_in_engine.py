"""The trainer inside the engine learns what one beside it learns, and only when it may."""

from __future__ import annotations

import pytest
import torch
from support.adapting import Pair

from vllm_specblock.adapt.link.finished import Finished
from vllm_specblock.adapt.link.folder_link import WAITING
from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.adapt.serving.in_engine import EngineTrainer
from vllm_specblock.adapt.trainer.trainer import Trainer, TrainerConfig


@pytest.fixture
def pair(tmp_path) -> Pair:
    return Pair.make(tmp_path)


def config(pair: Pair, **more) -> TrainerConfig:
    given = {"policy": "always", "actions": "heads", "lr": 3e-3, "every": 4, **more}
    return TrainerConfig(str(pair.drafter), str(pair.target), **given)


@pytest.fixture
def inside(pair):
    made = EngineTrainer(config(pair), share=1e9)
    yield made
    made.close()


class Requests:
    """The source of a trainer beside the engine."""

    def __init__(self, pair: Pair, count: int) -> None:
        self.left = [Finished(*pair.request(number)) for number in reversed(range(count))]

    def next(self) -> Finished | None:
        return self.left.pop() if self.left else None

    def count(self, name: str, by: int = 1) -> None: ...

    def tell(self) -> None: ...

    def swap_seconds(self, action: Action) -> float:
        return 0.0


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
    requests = Requests(pair, 12)
    beside = Trainer(config(pair), requests)
    while beside.step():
        pass
    here = serve(inside, pair, range(12))
    assert [each.number for each in here] == [1, 2, 3]
    assert all(each.action is Action.HEADS for each in here)
    current = beside.adaptation.pool.current
    assert current.number == 3
    for name, tensor in here[-1].tensors.items():
        torch.testing.assert_close(tensor, current.tensors[name])
    assert inside.counts["updates_heads"] == inside.counts["swaps"] == 3
    assert inside.counts["versions_offered"] == 3 and inside.counts["swap_microseconds"] == 3000


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
