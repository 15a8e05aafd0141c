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


@given(st.integers(0, 10**6), st.integers(60, 400))
def test_a_piece_is_whole_lines_of_its_text(tasks, seed, characters):
    piece = tasks.piece(TEXT, characters, random.Random(seed))
    assert f"\n{piece}" in f"\n{TEXT}"
    assert piece == "" or (piece.endswith("\n") and piece.strip("\n") + "\n" == piece)
    # All but the line that would have been too long.
    assert characters - 50 < len(piece) <= characters


def test_a_piece_of_a_short_text_is_empty(tasks):
    assert tasks.piece("a = 1\n" * 10, 60, random.Random(0)) == ""


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


def test_most_pieces_can_be_edited(tasks):
    rng = random.Random(0)
    found = [tasks.edit(tasks.piece(TEXT, 300, rng), rng) for _ in range(100)]
    assert sum(task is not None for task in found) > 80


def test_nothing_to_edit_and_nothing_to_quote(tasks):
    assert tasks.edit("return None\nreturn None\nonce = 1\n", random.Random(0)) is None
    assert tasks.quote("\n  \n", random.Random(0)) is None


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


def test_draws_are_the_same_again_and_of_the_form_asked_for(tasks):
    texts = ["too_short = 1\n", TEXT]
    for form in tasks.FORMS:
        once, again = (
            tasks.draw(texts, form, 5, random.Random(7), shortest=100, longest=300)
            for _ in range(2)
        )
        assert once == again and len(once) == 5
        assert {task.form for task in once} == {form}
    with pytest.raises(ValueError, match="No text has 600 characters"):
        tasks.draw(texts[:1], "edit", 1, random.Random(0), longest=300)
