"""Cache blocks that a drafter has not written are masked, and stay so until they are."""

from __future__ import annotations

import torch

from vllm_specblock.drafters.common.missed_rows import CacheHoles


def holes_of(*skipped: int) -> CacheHoles:
    """Blocks of 8 tokens, of which the rows in slots `skipped` were not written."""
    holes = CacheHoles(40, 8, torch.zeros(2, 3, dtype=torch.int64))
    if skipped:
        holes.skip(torch.tensor(skipped))
    return holes


def mask(holes, table, first, last):
    """The table, tokens hidden, first position stored, and the blind requests."""
    table = torch.tensor(table, dtype=torch.int32)
    blind = holes.mask(table, torch.tensor(first), torch.tensor(last))
    count = len(table)
    return (
        table.tolist(),
        holes.masks[0, :count].tolist(),
        holes.masks[1, :count].tolist(),
        None if blind is None else blind.tolist(),
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
