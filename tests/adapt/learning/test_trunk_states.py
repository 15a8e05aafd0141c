"""Kept states give the depths that running every layer gives, and are of bounded size."""

from __future__ import annotations

import gc

import pytest
import torch
from support.records import random_record, small_drafter, small_teacher

from vllm_specblock.adapt.learning import trunk_states
from vllm_specblock.adapt.learning.judge import Judge
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.learning.trunk_states import TrunkStates
from vllm_specblock.adapt.policy.actions import held, trains
from vllm_specblock.adapt.policy.interface import Action


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """The layers' runs over a text."""
    runs: list[int] = []
    real = trunk_states.states_along
    monkeypatch.setattr(trunk_states, "states_along", lambda *given: runs.append(1) or real(*given))
    return runs


def origin() -> Version:
    return Version(0, held(small_drafter(), Action.FULL))


def other_heads(parent: Version, number: int) -> Version:
    """A version of the parent's own tensors but for random heads."""
    drafter = small_drafter(seed=10 + number)
    return Version(number, held(drafter, Action.HEADS, parent.tensors), Action.HEADS, 0)


def judges() -> tuple[Judge, Judge]:
    """One with kept states, and one without."""
    first = origin()
    kept, plain = (Judge(small_drafter(), small_teacher(), 2) for _ in range(2))
    kept.states = TrunkStates(first.tensors)
    return kept, plain


def test_depths_are_those_of_all_layers(ran):
    kept, plain = judges()
    first = Version(0, kept.states._same[0])
    versions = [first, *(other_heads(first, number) for number in range(1, 4))]
    records = [random_record("r", rows=24, prompt=5, seed=seed) for seed in range(6)]
    # As judging goes: text by text, so that what a drafter holds changes all the time.
    found = [kept.depths(versions, each) for each in records]
    assert found == [plain.depths(versions, each) for each in records]
    assert sum(len(set(each.values())) > 1 for each in found) > 3, "heads make a difference"
    assert len(ran) == len(records)


def test_a_version_of_another_trunk_runs_its_own_layers(ran):
    kept, plain = judges()
    first, record = Version(0, kept.states._same[0]), random_record("r", rows=40, prompt=5, seed=1)
    other = Version(1, held(small_drafter(seed=4), Action.FULL), Action.FULL, 0)
    versions = (first, other, other_heads(other, 2))
    assert kept.depths(versions, record) == plain.depths(versions, record)
    assert [kept.states.serve(each) for each in versions] == [True, False, False] and len(ran) == 1


def test_what_comes_from_a_folder_is_known_by_its_values(monkeypatch):
    states = TrunkStates(origin().tensors)
    copied = {name: each.clone() for name, each in other_heads(origin(), 1).tensors.items()}
    again = Version(1, copied, Action.FULL)
    assert states.serve(again)
    compared: list[int] = []
    real = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *pair: compared.append(1) or real(*pair))
    assert states.serve(other_heads(again, 2)) and states.serve(again) and not compared
    one = next(name for name in copied if not trains(Action.HEADS, name))
    assert not states.serve(Version(3, {**copied, one: copied[one] + 1e-3})) and compared


def test_room_is_bounded_and_a_record_that_goes_frees_its_own(ran):
    first, drafter, teacher = origin(), small_drafter(), small_teacher()
    records = [random_record("r", rows=24, prompt=5, seed=seed) for seed in range(4)]
    texts = [teacher.sequence(each) for each in records]

    def ask(number: int) -> int:
        """Whether it had to be run."""
        before = len(ran)
        states.along(drafter, records[number], texts[number], 2)
        return len(ran) - before

    states = TrunkStates(first.tensors)
    ask(0)
    room = 3 * states.bytes
    states = TrunkStates(first.tensors, room / 2**20)
    assert [ask(each) for each in (0, 1, 2, 0)] == [1, 1, 1, 0] and states.bytes == room
    assert [ask(each) for each in (3, 0, 2, 1)] == [1, 0, 0, 1] and states.bytes == room
    del records[2]
    gc.collect()
    assert states.bytes == room - room // 3
