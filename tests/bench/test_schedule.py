"""Who answers what, and beside whom."""

from __future__ import annotations

import pytest

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import Question, read_sets
from vllm_specblock.bench.schedule import groups, rotated, units


def short(config):
    return [
        (unit.round, unit.set, ",".join(q.id for q in unit.questions), unit.temperature, unit.turn)
        for unit in units(config, read_sets(config))
    ]


def test_sets_take_turns_and_chats_go_on(make_config):
    found = short(make_config(questions=2, rounds=2, temperature=(0.0, 1.0)))
    assert found[:7] == [
        (0, "chats", "a", 0.0, 0),
        (0, "chats", "a", 0.0, 1),
        (0, "chats", "a", 1.0, 0),
        (0, "chats", "a", 1.0, 1),
        (0, "single", "q0", 0.0, 0),
        (0, "single", "q0", 1.0, 0),
        (0, "chats", "b", 0.0, 0),
    ]
    assert len(found) == 2 * 2 * (2 * 2 + 2) == len({*found})
    assert [each[0] for each in found] == [0] * 12 + [1] * 12


def test_sets_of_different_lengths_end_when_they_end(make_config):
    found = short(make_config())
    assert len(found) == 4 + 5 and found[-1] == (0, "single", "q4", 0.0, 0)


def test_batches_have_as_many_turns(make_config):
    config = make_config(batch=2)
    mixed = [Question(str(n), ("x",) * turns) for n, turns in enumerate((1, 1, 1, 2, 2, 1))]
    every = units(config, {"s": mixed})
    found = [(",".join(q.id for q in unit.questions), unit.turn, unit.last) for unit in every]
    assert found == [
        ("0,1", 0, True),
        ("2", 0, True),
        ("3,4", 0, False),
        ("3,4", 1, True),
        ("5", 0, True),
    ]


def test_keys_tell_units_apart(make_config):
    config = make_config(rounds=2, temperature=(0.0, 1.0))
    every = [*units(config, read_sets(config))]
    assert len({unit.key() for unit in every}) == len(every)
    assert every[1].key(0) == every[0].key()


def test_plain_vllm_is_in_every_group():
    assert groups([1, 2], [3, 4, 5], None) == [[1, 2, 3, 4, 5]]
    assert groups([1, 2], [3, 4, 5], 4) == [[1, 2, 3, 4], [1, 2, 5]]
    assert groups([1, 2], [], None) == groups([1, 2], [], 1) == [[1, 2]]
    with pytest.raises(BenchError, match="--at-once is 2, but must be at least 3"):
        groups([1, 2], [3], 2)


def test_everybody_comes_first_at_times():
    assert [rotated("abc", by) for by in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rotated([], 3) == []
