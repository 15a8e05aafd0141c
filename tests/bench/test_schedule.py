"""Who answers what, and beside whom."""

from __future__ import annotations

import pytest

from vllm_specblock.bench.config import BenchError
from vllm_specblock.bench.questions import read_sets
from vllm_specblock.bench.schedule import groups, units


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


def test_plain_vllm_is_in_every_group():
    assert groups([1, 2], [3, 4, 5], None) == [[1, 2, 3, 4, 5]]
    assert groups([1, 2], [3, 4, 5], 4) == [[1, 2, 3, 4], [1, 2, 5]]
    assert groups([1, 2], [], None) == groups([1, 2], [], 1) == [[1, 2]]
    with pytest.raises(BenchError, match="--at-once is 2, but must be at least 3"):
        groups([1, 2], [3], 2)
