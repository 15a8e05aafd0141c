"""How much of a text is a copy, whose prompts are measured, and the table."""

from __future__ import annotations

import json

import copying
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specblock.engine.metrics.acceptance import STEPS, TOKENS


def naive_shares(prompt, answer):
    copies = repeats = 0
    for place in range(len(answer)):
        text = prompt + answer[: place + 1]
        end = text[-copying.GRAM :]
        if any(prompt[i : i + len(end)] == end for i in range(len(prompt) - copying.GRAM + 1)):
            copies += 1
        else:
            # Runs that end in the answer, before this one.
            lasts = range(len(prompt), len(text) - 1)
            repeats += any(text[max(0, i - copying.GRAM + 1) : i + 1] == end for i in lasts)
    return copies / len(answer), repeats / len(answer)


@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
def test_shares_are_what_a_slow_search_finds(prompt, answer):
    assert copying.origins(prompt, answer) == naive_shares(prompt, answer)


def test_a_copy_is_a_copy_and_a_loop_is_a_loop():
    prompt = list(range(20))
    assert copying.origins([*prompt, *prompt[:4]], prompt[4:12]) == (1.0, 0.0)
    assert copying.origins(prompt, [30, 31, 32, 33, 34]) == (0.0, 0.0)
    assert copying.origins(prompt, [50] * 30) == (0.0, 26 / 30)


def test_all_prompts_of_a_form_count_in_the_files_order(tmp_path):
    path = tmp_path / "held_out.jsonl"
    lines = [{"form": form, "prompt": f"{form} {i}"} for i in range(3) for form in copying.FORMS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert copying.load_prompts(path, 2) == {
        "edit": ["edit 0", "edit 1"],
        "quote": ["quote 0", "quote 1"],
    }
    with pytest.raises(SystemExit, match="3 prompts of the form 'edit', but --prompts is 4"):
        copying.load_prompts(path, 4)
    with pytest.raises(SystemExit, match=r"run examples/copying/build.py first"):
        copying.load_prompts(tmp_path / "none", 1)


def test_every_engine_of_two_heads_has_one_of_each_kind():
    found = copying.engines("folder", 24, 1)
    assert found[copying.PLAIN] is None
    pairs = [keys for keys in found.values() if keys and "second_drafter" in keys]
    assert len(pairs) == 3
    for keys in pairs:
        assert {keys["kind"], keys["second_drafter"]["kind"]} == {"specblock", "ngram"}
        assert keys["num_speculative_tokens"] == 24
    alone = [name for name in found if name.startswith(copying.BASE)]
    assert len(alone) == len(copying.ALONE)


def cell(seconds, drafts, accepted, **more):
    counters = {STEPS: drafts, TOKENS: drafts + accepted}
    return {"tokens": 100, "seconds": seconds, "counters": counters, "digests": ["a"], **more}


def result(edit, quote, **more):
    """The same at both temperatures, T = 1 taking twice the time."""
    return {
        copying.cell_name(form, t): cell(seconds * (1 + t), *counts, **more)
        for form, (seconds, *counts) in (("edit", edit), ("quote", quote))
        for t in copying.TEMPERATURES
    }


def test_totals_weigh_by_steps_and_by_time():
    found = copying.total(result((1.0, 50, 50), (3.0, 10, 90), different=1), 0.0)
    # 140 accepted in 60 steps, and 200 tokens in 4 s: not the means of τ 2 and 10, 100/s and 33/s.
    assert found == {"tau": pytest.approx(1 + 140 / 60), "speed": 50.0, "different": 2}


def test_table_compares_with_the_fastest_specblock_alone():
    rows = copying.markdown(
        {
            copying.PLAIN: result((2.0, 0, 0), (2.0, 0, 0)),
            f"{copying.BASE}, N = 12, M = 1": result((1.0, 50, 50), (1.0, 50, 50), different=0),
            f"{copying.BASE}, N = 60, M = 2": result((2.0, 25, 75), (2.0, 25, 75), different=0),
            "n-gram": result((0.5, 25, 75), (0.5, 25, 75), different=1),
        }
    ).splitlines()
    assert rows[2] == "| vLLM | 1.00 | 50.0 | 0.50 | 1.00 | 25.0 | 0.50 | – |"
    assert rows[4].startswith(f"| {copying.BASE}, N = 60, M = 2 | 4.00 | 50.0 | 0.50 |")
    assert rows[5] == "| n-gram | 4.00 | 200.0 | 2.00 | 4.00 | 100.0 | 2.00 | 4 of 4 |"
