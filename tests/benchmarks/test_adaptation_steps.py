"""What is told of steps and swaps, on steps made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from adaptation_steps import Again, steps_of, swap_summary


class Serving:
    """An engine whose requests get so many tokens in every step."""

    def __init__(self, each: list[int]):
        self.each, self.length, self.steps, self.llm_engine = each, {}, 0, self

    def add_request(self, name, prompt, params) -> None:
        self.length[name], self.most = 0, params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return any(length < self.most for length in self.length.values())

    def step(self) -> list:
        self.steps += 1
        answers = []
        for name, grows in zip(self.length, self.each):
            self.length[name] = min(self.most, self.length[name] + grows)
            tokens = [0] * self.length[name]
            finished = self.length[name] == self.most
            answers.append(
                SimpleNamespace(
                    request_id=name, outputs=[SimpleNamespace(token_ids=tokens)], finished=finished
                )
            )
        return answers


def test_steps_in_which_all_requests_decode():
    serving, called = Serving([1, 2]), []
    # All have three tokens after the third step; the second request ends in the sixth.

    def before(counts: bool) -> None:
        called.extend([serving.steps] * counts)

    found = steps_of(serving, ["a", "b"], 12, "x", before)
    assert called == [3, 4, 5] and len(found) == 3 and serving.steps == 12
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        steps_of(Serving([4]), ["a"], 4, "x")


def test_a_swap_is_held_against_steps_without_one():
    heads = {"lm_head.weight": torch.zeros(2)}
    link, steps = Again(heads, every=3), []
    for number in range(11):
        link.step = number
        version = link.staged()
        steps.append(0.01)
        if number in (4, 9):
            steps[-1] = 0.014 if number == 4 else 0.03
            link.took(None, 0.001 * number)
        assert (version is not None) == (number in (3, 7))
        link.step = -1
        assert link.staged() is None
    assert link.trips == [range(3, 5), range(7, 10)]
    found = swap_summary(steps, link)
    assert found["swaps"] == 2 and found["step_ms"] == pytest.approx(10)
    assert found["ratio"] == pytest.approx(3.0) and found["usual_ratio"] == pytest.approx(2.2)
    assert found["copy_ms"] == pytest.approx(6.5) and found["steps_of_a_trip"] == 2.5
