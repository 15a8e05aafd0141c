"""Copy tasks: what is asked can be done by copying, and the answer is the right one."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/copying"


@pytest.fixture(scope="module")
def tasks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        import tasks

        yield tasks
    del sys.modules["tasks"]


TEXT = "".join(
    f"def first_{i}(value, other):\n    return value.load({i}, other)\n\n" for i in range(60)
)


def swap(text, old, new):
    """`old` by `new` where no letter, digit or underscore is beside it, word by word."""
    return "".join(new if word == old else word for word in re.split(r"(\W)", text))


@given(st.integers(0, 10**6))
def test_edit_renames_one_name_throughout(tasks, seed):
    rng = random.Random(seed)
    piece = tasks.piece(TEXT, 300, rng)
    task = tasks.edit(piece, rng)
    if task is None:  # the new name was one of the piece
        return
    assert task.prompt.startswith(piece)
    asked = re.fullmatch(r"# edited: (\w+) -> (\w+)", task.prompt.splitlines()[-1])
    old, new = asked.groups()
    assert task.answer == "\n" + swap(piece, old, new)
    assert piece.count(old) > 1 and new not in re.split(r"\W", piece)


@given(st.integers(0, 10**6))
def test_quotes_are_the_last_lines_of_the_piece_in_order(tasks, seed):
    rng = random.Random(seed)
    piece = tasks.piece(TEXT, 300, rng)
    task = tasks.quote(piece, rng)
    before, quoted = (task.prompt + task.answer).split("# quotes:\n")
    assert before == piece + "\n"
    lines = [line.removeprefix("# > ") for line in quoted.splitlines()]
    kept = [line.strip() for line in piece.splitlines() if line.strip()]
    assert len(lines) > len(kept) / 2 and lines == kept[-len(lines) :]
    # What is given of the first line is its first word.
    assert task.prompt.endswith("# > " + re.match(r"\w+", lines[0])[0])
