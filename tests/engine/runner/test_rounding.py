"""Few different numbers of committed rows: rounded up where requests have room for padding."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specblock.engine.runner.step_batch import rounding


@pytest.mark.parametrize(
    ("rows", "room", "added"),
    [
        (16, [4, 4], [0, 0]),  # few rows stay as they are
        (17, [4, 4], [4, 3]),
        (17, [0, 9, 2], [0, 7, 0]),
        (23, [3], [1]),
        (24, [3, 3], [0, 0]),
        (25, [2, 0, 1], [2, 0, 1]),  # not room enough: as near as it goes
        (30, [], []),
    ],
)
def test_rows_that_are_added(rows, room, added):
    assert rounding(rows, np.array(room, dtype=np.int64)).tolist() == added
