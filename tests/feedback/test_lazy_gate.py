"""The gate against made-up heads whose laws are known."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_specblock.feedback.lazy_gate import BUCKETS, LazyGate

SURE = (2.0 ** ((torch.arange(BUCKETS) - BUCKETS + 0.5) / 2)).float()
"""A confidence in the middle of every bucket, for means."""

USED = slice(3, 13)
"""Buckets that the made-up texts fall into, all equally often."""


def alone_law(bucket: torch.Tensor) -> torch.Tensor:
    """Expected accepted tokens with the first head alone: surer is better."""
    return 0.4 * bucket


def both_law(best_from: int):
    """The second head adds 2 tokens below `best_from`, and nothing from there on."""
    return lambda bucket: alone_law(bucket) + 2.0 * (bucket < best_from)


def drive(
    gate: LazyGate, target_probs, steps: int, seed: int = 0, requests: int = 8
) -> list[float]:
    """Serve `steps` steps; the share of requests that drafted both, step by step."""
    draw, shares = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        bucket = torch.randint(USED.start, USED.stop, (requests,), generator=draw)
        key = step * 3 + 1000 * torch.arange(requests)
        both = gate.wants(SURE[bucket], key)
        expected = torch.where(both, target_probs(bucket), alone_law(bucket))
        accepted = torch.poisson(expected.float(), generator=draw).int()
        gate.learn(SURE[bucket], both, accepted, torch.ones_like(both))
        shares.append(both.float().mean().item())
    return shares


def true_rate(threshold: int, target_probs, cost: float) -> float:
    """Tokens per time of a threshold, if laws were known."""
    bucket = torch.arange(BUCKETS)[USED]
    both = bucket < threshold
    tokens = 1 + torch.where(both, target_probs(bucket), alone_law(bucket))
    return (tokens.mean() / (1 + cost * both.float().mean())).item()


def best_threshold(target_probs, cost: float) -> int:
    return max(range(BUCKETS + 1), key=lambda threshold: true_rate(threshold, target_probs, cost))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "best_from, cost, expected",
    [(8, 0.15, 8), (8, 0.3, 8), (8, 1.0, 3), (16, 0.15, 13), (0, 0.15, 0)],
    ids=["cheap", "dearer", "too dear", "always better", "never better"],
)
def test_finds_the_best_threshold(best_from, cost, expected, seed):
    target_probs = both_law(best_from)
    best = true_rate(expected, target_probs, cost)
    assert best == pytest.approx(true_rate(best_threshold(target_probs, cost), target_probs, cost))
    gate = LazyGate("cpu", cost=cost)
    drive(gate, target_probs, 800, seed)
    assert true_rate(int(gate.threshold), target_probs, cost) >= 0.99 * best
    shares = drive(gate, target_probs, 200, seed + 10)
    rate = torch.tensor(shares).mean().item()
    # One in 16 does the opposite, whichever way is the better one.
    wanted = (min(max(expected, USED.start), USED.stop) - USED.start) / 10
    assert rate == pytest.approx(wanted * 15 / 16 + (1 - wanted) / 16, abs=0.12)


def test_starts_with_both_heads():
    gate = LazyGate("cpu")
    assert gate.threshold == BUCKETS
    nothing = torch.zeros(2, dtype=torch.int32)
    gate.learn(SURE[:2], nothing.bool(), nothing, nothing.bool())
    assert gate.threshold == BUCKETS
    assert gate.wants(SURE, torch.ones(BUCKETS, dtype=torch.int64)).all()


def test_follows_a_change():
    """The second head is worth it everywhere, then nowhere, then everywhere again."""
    gate = LazyGate("cpu", decay=0.995)
    for best_from in (16, 0, 16):
        target_probs = both_law(best_from)
        drive(gate, target_probs, 1200, seed=best_from)
        best = true_rate(best_threshold(target_probs, gate.cost), target_probs, gate.cost)
        assert true_rate(int(gate.threshold), target_probs, gate.cost) >= 0.97 * best


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 16, 64])
def test_one_request_in_sixteen_explores(stride):
    """Whatever the pace of positions; on both sides of the threshold."""
    gate = LazyGate("cpu")
    gate.threshold.fill_(8)
    key = 17 + stride * torch.arange(4096)
    for bucket, usual in ((4, True), (11, False)):
        wants = gate.wants(SURE[bucket].expand(4096), key)
        assert (wants != usual).float().mean().item() == pytest.approx(1 / 16, rel=0.05)
        assert torch.equal(wants, gate.wants(SURE[bucket].expand(4096), key)), "no random state"
        gaps = (wants != usual).nonzero()[:, 0].diff()
        assert gaps.max() < 256, "tried again well before what is known fades"


def test_a_threshold_is_monotone():
    gate = LazyGate("cpu")
    key = torch.ones(BUCKETS, dtype=torch.int64)  # explores nothing
    for threshold in range(BUCKETS + 1):
        gate.threshold.fill_(threshold)
        assert gate.wants(SURE, key).tolist() == [b < threshold for b in range(BUCKETS)]


def test_an_empty_tree_always_asks_the_second_drafter():
    gate = LazyGate("cpu")
    gate.threshold.zero_()
    key = torch.arange(1000)
    assert gate.wants(torch.zeros(1000), key).all()
    # And teaches nothing: there is no other way to compare with.
    yes = torch.ones(1000, dtype=torch.bool)
    gate.learn(torch.zeros(1000), yes, key, yes)
    assert gate.steps.sum() == gate.accepted.sum() == 0


def test_state_equals_a_plain_loop():
    gate, decay = LazyGate("cpu", decay=0.9), 0.9
    steps, accepted = ([[0.0] * BUCKETS for _ in "12"] for _ in "12")
    draw = torch.Generator().manual_seed(5)
    for turn in range(30):
        bucket = torch.randint(0, BUCKETS, (6,), generator=draw)
        both, live = (torch.randint(0, 2, (6,), generator=draw).bool() for _ in "12")
        live &= turn % 5 != 0  # steps that verified nothing: nothing fades
        got = torch.randint(0, 9, (6,), generator=draw).int()
        gate.learn(SURE[bucket], both, got, live)
        if live.any():
            for table in (*steps, *accepted):
                table[:] = [decay * value for value in table]
        for request in range(6):
            if live[request]:
                steps[both[request]][bucket[request]] += 1
                accepted[both[request]][bucket[request]] += int(got[request])
    torch.testing.assert_close(gate.steps, torch.tensor(steps))
    torch.testing.assert_close(gate.accepted, torch.tensor(accepted))


@pytest.mark.parametrize("how, top", [("mean", 1.0), ("sum", 32.0)])
def test_buckets_are_half_octaves(how, top):
    gate = LazyGate("cpu", how=how)
    given = torch.tensor([0.0, top / 1000, top * 0.26, top * 0.36, top * 0.51, top * 0.8, top])
    assert gate.bucket(given).tolist() == [0, 0, 12, 13, 14, 15, 15]


def test_what_is_not_live_is_not_looked_at():
    gate = LazyGate("cpu")
    rubbish = torch.tensor([float("nan"), float("inf")])
    gate.learn(rubbish, torch.tensor([True, False]), torch.tensor([99, -7]), torch.zeros(2).bool())
    assert not gate.steps.any() and not gate.accepted.any() and gate.threshold == BUCKETS


def test_nothing_is_read_on_the_host_and_the_state_stays_in_place():
    """A fake tensor has no value: any `.item()` or data-dependent shape raises."""
    with FakeTensorMode():
        gate = LazyGate("cpu")
        state = gate.steps, gate.accepted, gate.threshold
        sure, key = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
        both = gate.wants(sure, key)
        gate.learn(sure, both, key.int(), both)
        assert all(a is b for a, b in zip(state, (gate.steps, gate.accepted, gate.threshold)))
    assert both.shape == (3,)
