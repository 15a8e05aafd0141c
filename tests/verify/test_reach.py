"""What is learned about scores, and that any prefix of a tree stays its likeliest part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specblock.verify.reach import BINS_PER_NAT, NUM_BINS, PRIOR, ReachTable, on_path

NEVER = float("-inf")


def scores(*rows):
    return torch.tensor(rows, dtype=torch.float32).log()


def test_before_anything_is_seen_scores_are_believed():
    table = ReachTable("cpu")
    logprob = scores([0.9, 0.5, 0.1, 0.0])
    survival = table.survival(torch.zeros(1, dtype=torch.int64), logprob)
    torch.testing.assert_close(survival, torch.tensor([[0.9, 0.5, 0.1, 0.0]]))


def test_what_is_reached_half_as_often_as_expected_counts_half():
    table = ReachTable("cpu", decay=1.0)
    logprob = scores([0.8, 0.3]).expand(400, 2)
    reached = torch.zeros(400, 2, dtype=torch.bool)
    reached[:160, 0] = True  # 160 of 320 expected
    reached[:120, 1] = True  # 120 of 120
    greedy = torch.zeros(400, dtype=torch.int64)
    table.learn(greedy, logprob, reached, torch.ones_like(reached))
    factor = (160 + PRIOR) / (320 + PRIOR)
    found = table.survival(greedy[:1], logprob[:1])
    torch.testing.assert_close(found, torch.tensor([[0.8 * factor, 0.3]]))
    # Requests that sample are another matter.
    torch.testing.assert_close(table.survival(greedy[:1] + 1, logprob[:1]), logprob[:1].exp())


def test_nodes_that_were_cut_or_are_none_say_nothing():
    table = ReachTable("cpu")
    logprob = torch.tensor([[-0.1, -0.2, NEVER]])
    judged = torch.tensor([[True, False, False]])
    table.learn(torch.zeros(1, dtype=torch.int64), logprob, torch.ones(1, 3).bool(), judged)
    assert table.reached.sum() == 1
    assert table.expected.sum() == pytest.approx(logprob[0, 0].exp().item())


def test_old_steps_fade_but_only_when_something_new_is_seen():
    table = ReachTable("cpu", decay=0.5)
    kind, logprob = torch.zeros(1, dtype=torch.int64), torch.tensor([[-0.1]])
    seen = torch.ones(1, 1, dtype=torch.bool)
    for _ in range(2):
        table.learn(kind, logprob, seen, seen)
    assert table.reached.sum() == 1.5
    table.learn(kind, logprob, seen, ~seen)
    assert table.reached.sum() == 1.5


@given(st.data())
def test_survival_never_rises_and_steps_multiply_to_it(data):
    table = ReachTable("cpu")
    for name in ("expected", "reached"):
        values = data.draw(st.lists(st.floats(0, 50), min_size=NUM_BINS, max_size=NUM_BINS))
        getattr(table, name)[:] = torch.tensor(values)
    row = data.draw(st.lists(st.floats(-12, 0), min_size=1, max_size=40))
    row = sorted(row, reverse=True) + [NEVER] * data.draw(st.integers(0, 3))
    logprob, kind = torch.tensor([row]), torch.tensor([data.draw(st.integers(0, 1))])
    survival = table.survival(kind, logprob)
    assert (survival.diff(dim=1) <= 0).all()
    assert (survival[logprob == NEVER] == 0).all()
    assert ((survival >= 0) & (survival <= 1)).all()
    torch.testing.assert_close(table.steps(kind, logprob).cumprod(1), survival)


def test_bins_are_quarter_nats():
    table = ReachTable("cpu")
    kind = torch.zeros(1, dtype=torch.int64)
    logprob = torch.tensor([[-0.01, -0.24, -0.26, -7.9, -100.0]])
    seen = torch.ones_like(logprob, dtype=torch.bool)
    table.learn(kind, logprob, seen, seen)
    assert table.reached[0, :2].tolist() == [2, 1] and table.reached[0, -1] == 2
    assert NUM_BINS / BINS_PER_NAT == 8


def test_nodes_on_the_path_up_to_what_was_accepted():
    path = torch.tensor([[0, 1, 3, 4], [0, 2, 4, 0], [0, 5, 1, 2]])
    found = on_path(path, torch.tensor([3, 1, 0]), 5)
    assert [[1 + i for i, on in enumerate(row) if on] for row in found.tolist()] == [
        [1, 3, 4],
        [2],
        [],
    ]
