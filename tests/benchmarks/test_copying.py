"""Which prompts are copy-heavy, and the table."""

from __future__ import annotations

import copying
from hypothesis import given
from hypothesis import strategies as st

TEXT = "".join(f"    first_name_{i} = load(value, {i})\n" for i in range(12))


def naive_share(prompt, answer):
    hits = 0
    for place in range(len(answer)):
        text = prompt + answer[: place + 1]
        end = text[-copying.GRAM :]
        hits += any(prompt[i : i + copying.GRAM] == end for i in range(len(prompt)))
    return hits / len(answer)


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
def test_share_is_what_a_slow_search_finds(prompt, answer):
    assert copying.copied(prompt, answer) == naive_share(prompt, answer)


def test_a_copy_is_a_copy_and_other_text_is_not():
    prompt = list(range(20))
    assert copying.copied([*prompt, *prompt[:4]], prompt[4:12]) == 1.0
    assert copying.copied(prompt, [30, 31, 32, 33, 34]) == 0.0
    # A loop of its own is no copy of the prompt.
    assert copying.copied(prompt, [50] * 30) == 0.0


def test_a_name_is_renamed_throughout_and_only_there():
    assert copying.rename("loader = loader.loader_of(loader)\n") == (
        "renamed = renamed.loader_of(renamed)\n"
    )
    assert copying.rename("if x: return None\n") == "if x: return None\n"


def test_candidates_end_within_a_line_and_begin_with_the_piece():
    found = copying.candidates([TEXT, "too = short\n"], 2)
    assert [form for form, _ in found] == list(copying.FORMS) * 2
    lines = TEXT.splitlines(True)
    for (form, prompt), first in zip(found, [0, 0, 0, 2, 2, 2]):
        assert not prompt.endswith("\n") and prompt.startswith(lines[first])
        if form == "edit":
            assert prompt.count(lines[first + 7]) == 1
            assert prompt.endswith(copying.rename("".join(lines[first : first + 3])).rstrip("\n"))


def test_choice_goes_by_share_and_takes_forms_in_turn():
    asked = [("edit", "e1"), ("edit", "e2"), ("edit", "e1"), ("quote", "q"), ("repeat", "r")]
    chosen, figures = copying.choose(asked, [0.9, 0.8, 1.0, 0.85, 0.1], 0.8, 3)
    assert chosen == ["e1", "q", "e2"]
    assert figures["edit"] == {"asked": 3, "copies": 2, "mean_share": 0.9}
    assert figures["repeat"] == {"asked": 1, "copies": 0, "mean_share": 0.1}


def test_table_compares_with_plain_and_with_specblock_alone():
    def found(speed, tau, **more):
        return {"tokens_per_second": speed, "tau": tau, "digests": ["a", "b"], **more}

    rows = copying.markdown({
        copying.PLAIN: found(100.0, 1.0),
        copying.BASE: found(120.0, 3.0, different=0),
        "n-gram": found(180.0, 5.25, different=1),
    }).splitlines()  # fmt: skip
    assert rows[2] == "| vLLM | 1.00 | 100.0 | 1.00 | 0.83 | – |"
    assert rows[4] == "| n-gram | 5.25 | 180.0 | 1.80 | 1.50 | 1 of 2 |"
