"""Rows that drafters missed are kept, and handed over when they catch up."""

from __future__ import annotations

import numpy as np
import torch
from support.committed import rows_of
from support.lone_drafters import MAX_LEN, PAGE

from vllm_specblock.drafters.common.missed_rows import Backlog, MissedRows

EVERYONE = np.ones(3, dtype=bool)


class Course:
    """Three requests, step by step: a prompt each, then a few tokens in every step."""

    def __init__(self, width):
        draw = torch.Generator().manual_seed(2)
        self.text = torch.randint(0, 2048, (3, MAX_LEN), generator=draw)
        self.tables = (torch.randperm(39, generator=draw) + 1).view(3, -1)
        self.states = torch.randn(3, 3, MAX_LEN, width, generator=draw)
        self.done = [0, 0, 0]

    def step(self, tokens=(2, 1, 3)):
        rows = [(a, a + n) for a, n in zip(self.done, tokens)]
        self.done = [end for _, end in rows]
        return rows_of(rows, self.tables, self.states, self.text, PAGE)


def test_only_those_that_rested_catch_up():
    course, backlog = Course(8), Backlog()
    kept = backlog.keep(MissedRows.of(course.step()), np.array([True, False, True]))
    assert kept.tolist() == [True, False, True]
    rows = backlog.catch_up(course.step())
    assert rows.row_start_host == [0, 4, 5, 11]
    assert rows.row_start.tolist() == rows.row_start_host
    assert rows.position.tolist() == [0, 1, 2, 3, 1, 0, 1, 2, 3, 4, 5]
    assert rows.last.tolist() == [3, 4, 10]
    for r, row in ((0, 1), (1, 4), (2, 10)):
        place = int(rows.position[row])
        assert rows.token[row] == course.text[r, place + 1]
        assert torch.equal(rows.states[2][rows.source[row]], course.states[2, r, place])
        assert rows.kv_slot[row] == course.tables[r, place // PAGE] * PAGE + place % PAGE


def test_dummy_batches_of_one_slot_do_not_add_up():
    """While an engine measures its steps all rows are in one slot, again and again from the start:
    together they would be more than a request may have."""
    backlog = Backlog()
    for _ in range(2 * MAX_LEN):
        rows = MissedRows([7, 7], (torch.zeros(6, 8),), None, [0, 3], [3, 3], [0, 0])
        assert backlog.keep(rows, EVERYONE[:2]).all()
        assert backlog.rows(7) == 3 and len(backlog.pieces[7]) == 1
    size = backlog.bytes
    backlog.keep(MissedRows([7], (torch.zeros(2, 8),), None, [0], [2], [3]), EVERYONE[:1])
    assert backlog.rows(7) == 5 and backlog.bytes == size // 3 * 5, "these go on"
    backlog.forget(7)
    assert backlog.bytes == 0


def test_what_finds_no_room_loses_its_request_all_it_had():
    course = Course(8)
    row = 64 + 3 * 8 * 4  # bytes: three layers of eight float32
    backlog = Backlog(most_bytes=8 * row)
    assert backlog.keep(MissedRows.of(course.step()), EVERYONE).all()  # 6 rows
    assert backlog.keep(MissedRows.of(course.step()), EVERYONE).tolist() == [True, False, False]
    assert backlog.bytes == 4 * row and set(backlog.pieces) == {0}
