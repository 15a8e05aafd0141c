"""What is learned about scores, and that any prefix of a tree stays its likeliest part."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specblock.feedback.acceptance_estimator import (
    BINS_PER_NAT,
    NUM_BINS,
    PRIOR,
    AcceptanceEstimator,
)

NEVER = float("-inf")
quick = settings(deadline=None)


def scores(*rows):
    return torch.tensor(rows, dtype=torch.float32).log()


def kinds(count, kind=0):
    return torch.full((count,), kind, dtype=torch.int64)


def test_before_anything_is_seen_scores_are_believed():
    logprob = scores([0.9, 0.5, 0.1, 0.0])
    survival = AcceptanceEstimator("cpu").survival(kinds(1), logprob)
    torch.testing.assert_close(survival, torch.tensor([[0.9, 0.5, 0.1, 0.0]]), rtol=0.03, atol=0.02)


def teach(table, logprob, rate, count=400, kind=0):
    """`count` trees whose node i was reached with the frequency rate[i]."""
    reached = torch.arange(count)[:, None] < torch.tensor(rate) * count
    learn(table, logprob.expand(count, -1), reached, torch.ones_like(reached), kind)


def learn(table, logprob, reached, judged, kind=0):
    temperature = torch.full((len(logprob),), float(kind))
    verdicts = {"logprob": logprob, "reached": reached, "judged": judged}
    table.learn_from(SimpleNamespace(temperature=temperature, **verdicts))


def test_nodes_are_worth_what_such_nodes_were():
    table = AcceptanceEstimator("cpu", decay=1.0)
    logprob = torch.tensor([[-0.125, -1.125, -2.125]])  # the middles of bins
    teach(table, logprob, [0.5, 0.3, 0.02])
    found = table.survival(kinds(1), logprob)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.3, 0.02]]), atol=0.01, rtol=0.0)
    # Requests that sample are another matter.
    other = table.survival(kinds(1, 1), logprob)
    torch.testing.assert_close(other, logprob.exp(), atol=0.01, rtol=0.0)


def naive_falling(counts, sums):
    """Pool adjacent violators, from left to right."""
    pools = []
    for n, s in zip(counts, sums):
        pools.append([n, s, 1])
        while len(pools) > 1 and pools[-2][1] / pools[-2][0] < pools[-1][1] / pools[-1][0]:
            n2, s2, w2 = pools.pop()
            pools[-1] = [pools[-1][0] + n2, pools[-1][1] + s2, pools[-1][2] + w2]
    return [s / n for n, s, width in pools for _ in range(width)]


@quick
@given(st.data())
def test_rates_are_the_nearest_that_fall(data):
    table = AcceptanceEstimator("cpu")
    numbers = st.lists(st.floats(0, 50), min_size=NUM_BINS, max_size=NUM_BINS)
    for kind in range(2):
        table.judged[kind] = torch.tensor(data.draw(numbers))
        table.reached[kind] = table.judged[kind] * torch.tensor(data.draw(numbers)) / 50
    believed = (-(torch.arange(NUM_BINS) + 0.5) / BINS_PER_NAT).exp()
    for kind, found in enumerate(table.rates()):
        sums = table.reached[kind] + PRIOR * believed
        wanted = naive_falling((table.judged[kind] + PRIOR).tolist(), sums.tolist())
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-3, atol=1e-4)


def test_old_steps_fade_when_something_new_is_seen_and_unverified_nodes_do_not_count():
    table = AcceptanceEstimator("cpu", decay=0.5)
    logprob, seen = torch.tensor([[-0.1, -0.2, NEVER]]), torch.ones(1, 3).bool()
    for _ in range(2):
        learn(table, logprob, seen, torch.tensor([[True, False, True]]))
    assert table.reached.sum() == table.judged.sum() == 1.5
    learn(table, logprob, seen, ~seen)
    assert table.reached.sum() == 1.5


@quick
@given(st.data())
def test_survival_never_rises_and_steps_multiply_to_it(data):
    table = AcceptanceEstimator("cpu")
    shares = st.lists(st.floats(0, 1), min_size=NUM_BINS, max_size=NUM_BINS)
    table.judged[:] = 50 * torch.tensor(data.draw(shares))
    table.reached[:] = table.judged * torch.tensor(data.draw(shares))
    row = data.draw(st.lists(st.floats(-12, 0), min_size=1, max_size=40))
    row = sorted(row, reverse=True) + [NEVER] * data.draw(st.integers(0, 3))
    logprob, kind = torch.tensor([row]), torch.tensor([data.draw(st.integers(0, 1))])
    survival = table.survival(kind, logprob)
    assert (survival.diff(dim=1) <= 0).all()
    assert (survival[logprob == NEVER] == 0).all()
    assert ((survival >= 0) & (survival <= 1.001)).all()
    torch.testing.assert_close(table.steps(kind, logprob).cumprod(1), survival)
