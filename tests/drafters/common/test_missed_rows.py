"""Rows that paused drafters missed: kept to catch up, or masked until they are written."""

from __future__ import annotations

import numpy as np
import torch
from support.committed import rows_of
from support.lone_drafters import MAX_LEN, PAGE

from vllm_specblock.cache_holes import CacheHoles
from vllm_specblock.committed import MissedRows
from vllm_specblock.drafters.common.missed_rows import Backlog


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
    backlog.keep(MissedRows.of(course.step()), np.array([True, False, True]))
    assert set(backlog.pieces) == {0, 2}
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


def rows_of_slot_7(*numbers: list[int]) -> MissedRows:
    """begin, length and position of its rows."""
    begin, length, position = map(np.array, numbers)
    return MissedRows(np.full(len(begin), 7), (torch.zeros(6, 8),), None, begin, length, position)


def test_dummy_batches_of_one_slot_do_not_add_up():
    """While an engine measures its steps all rows are in one slot, again and again from the start:
    together they would be more than a request may have."""
    backlog = Backlog()
    for _ in range(2 * MAX_LEN):
        backlog.keep(rows_of_slot_7([0, 3], [3, 3], [0, 0]))
        assert backlog.rows(7) == 3 and len(backlog.pieces[7]) == 1
    size = backlog.bytes
    backlog.keep(rows_of_slot_7([0], [2], [3]))
    assert backlog.rows(7) == 5 and backlog.bytes == size // 3 * 5, "these go on"
    backlog.forget(7)
    assert backlog.bytes == 0


def test_what_finds_no_room_loses_its_request_all_it_had():
    course = Course(8)
    row = 64 + 3 * 8 * 4  # bytes: three layers of eight float32
    backlog = Backlog(most_bytes=8 * row)
    backlog.keep(MissedRows.of(course.step()))
    assert backlog.bytes == 6 * row
    backlog.keep(MissedRows.of(course.step()))
    assert backlog.bytes == 4 * row and set(backlog.pieces) == {0}


# ---- Holes in the cache ----
def holes_of(*skipped: int) -> CacheHoles:
    """Blocks of 8 tokens, of which the rows in slots `skipped` were not written."""
    holes = CacheHoles(40, 8, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(9, dtype=bool))
    if skipped:
        holes.skip(torch.tensor(skipped))
    return holes


def mask(holes, table, first, last):
    """The table, tokens hidden, first position stored, and the blind requests; None: no hole."""
    table, req_idx = torch.tensor(table, dtype=torch.int32), 8 - torch.arange(len(table))
    found = holes.mask(table, torch.tensor(first), torch.tensor(last), req_idx)
    count = len(table)
    return (
        table.tolist(),
        holes.masks[0, :count].tolist(),
        holes.masks[1, :count].tolist(),
        holes.blind[req_idx].tolist() if found else None,
    )


def test_nothing_is_masked_where_no_row_was_skipped():
    holes = holes_of()
    assert not holes.any
    holes.skip(torch.tensor([-1, -1]))
    assert mask(holes, [[5, 6, 7]], [17], [17]) == ([[5, 6, 7]], [0], [0], None)
    assert not holes.any


def test_skipped_blocks_leave_the_table():
    holes = holes_of(6 * 8 + 7, 9 * 8)
    tables = [[5, 6, 7, 8, 4], [6, 9, 10, 3, 2], [1, 2, 3, 6, 9]]
    assert mask(holes, tables, [24, 16, 17], [25, 16, 18]) == (
        [[5, 7, 8, 4, 0], [10, 3, 2, 0, 0], [1, 2, 3, 6, 9]],
        [8, 16, 0],
        [0, 0, 0],
        [False, False, False],
    )
    assert holes.any


def test_a_block_with_a_hole_takes_no_rows_and_no_drafts():
    """Its request drafts again from the next block on."""
    holes = holes_of(6 * 8 + 2)
    assert mask(holes, [[5, 6, 7]], [11], [12]) == ([[5, 6, 7]], [0], [16], [True])
    assert mask(holes, [[5, 6, 7]], [13], [18]) == ([[5, 7, 0]], [8], [16], [False])
    assert mask(holes, [[5, 6, 7]], [19], [19]) == ([[5, 7, 0]], [8], [0], [False])


def test_a_hole_that_is_filled_from_its_start_is_gone():
    holes = holes_of(6 * 8 + 2, 6 * 8 + 3, 7 * 8)
    assert mask(holes, [[5, 6, 7]], [10], [17]) == ([[5, 6, 7]], [0], [0], [False])
    assert not holes.any


def test_a_block_in_new_hands_is_complete():
    """Its first row is written again; the rest of its table may be old."""
    holes = holes_of(6 * 8 + 2, 7 * 8)
    assert mask(holes, [[5, 6, 7]], [8], [9]) == ([[5, 6, 7]], [0], [0], [False])
    assert holes.missing[[6, 7]].tolist() == [8, 0]
    holes.skip(torch.tensor([6 * 8 + 2]))
    assert holes.missing[6] == 2 and holes.any
