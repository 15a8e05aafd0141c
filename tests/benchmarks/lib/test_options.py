"""Lists of numbers on a command line."""

from __future__ import annotations

import pytest
from lib.options import numbers


def test_numbers():
    assert numbers("30, 60,", "--budgets") == [30, 60]


@pytest.mark.parametrize("text", ["", "0", "30;60", "-3", "x"])
def test_what_are_no_numbers(text):
    with pytest.raises(SystemExit, match=r"--budgets is .* such as 30,60,120\.$"):
        numbers(text, "--budgets")
