"""Shaded answers: which token comes from where."""

from __future__ import annotations

from paper_plots import COLOURS, Case, Origin, committed_tokens, save_text

from vllm_specblock.train.eval.steps import Step

PREFILL, ACCEPTED, BONUS = Origin


def step(root: int, tokens: list[int], accepted: int, bonus: int | None) -> Step:
    """A chain of `tokens`, of which the first `accepted` are."""
    count = len(tokens)
    score = [-0.1 * n for n in range(count + 1)]
    return Step(
        0,
        [root, *tokens],
        list(range(-1, count)),
        score,
        [0] + [1] * count,
        list(range(accepted + 1)),
        bonus,
    )


def test_a_bonus_token_is_the_next_root_and_counts_once():
    steps = [step(1, [2, 3, 4], 2, 5), step(5, [6], 0, 7), step(7, [8, 9], 2, None)]
    assert committed_tokens(steps) == [
        (1, PREFILL),
        (2, ACCEPTED),
        (3, ACCEPTED),
        (5, BONUS),
        (7, BONUS),
        (8, ACCEPTED),
        (9, ACCEPTED),
    ]
    assert committed_tokens([]) == []


class Letters:
    def decode(self, ids):
        return "".join(["a", " $b$\n", "<c>"][each] for each in ids)


def test_an_answer_is_shaded(tmp_path):
    cases = {name: Case([step(0, [1], 1, 2)], "block") for name in ("one", "two")}
    save_text(cases, Letters(), 2, tmp_path / "text.svg")
    drawn = (tmp_path / "text.svg").read_text()
    assert "$b$" in drawn and "one" in drawn and COLOURS[ACCEPTED] in drawn
