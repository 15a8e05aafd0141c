"""What is learned from verdicts: rates of scores, β, a drafter's gain."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors import assert_equal
from support.verification import falling_rates, some_requests, verified_of
from vllm_specblock.triton_kernels.feedback.write_survival import Later
from vllm_specblock.triton_kernels.feedback.write_survival_numba import learn_scores_numba

from vllm_specblock.feedback.acceptance_estimator import (
    BINS_PER_NAT,
    NUM_BINS,
    AcceptanceEstimator,
    learn_scores,
    write_survival,
)
from vllm_specblock.feedback.calibration import GREEDY, RATES, SAMPLING, DraftCalibration
from vllm_specblock.feedback.skip_gate import DrafterGate, first_token
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.tree import DraftTree


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_promised_and_kept_are_of_the_nodes_that_were_run(count, draw):
    requests = some_requests(count, draw)
    verified = verified_of(requests)
    assert verified.temperature.tolist() == pytest.approx([each.temperatures for each in requests])
    assert verified.live.tolist() == [each.run > 0 for each in requests]
    assert verified.judged.sum(1).tolist() == [each.run for each in requests]
    assert verified.reached.sum(1).tolist() == [each.accepted for each in requests]
    for head in (0, 1):
        expected, accepted, any_of_it = verified.of_drafter(head)
        for index, request in enumerate(requests):
            mine = [node for node, by in enumerate(request.origin) if by & (1 << head)]
            run = [node for node in mine if node < request.run]
            assert bool(any_of_it[index]) == bool(run)
            promised = sum(request.chance[node] for node in run)
            assert float(expected[index]) == pytest.approx(promised, rel=1e-5)
            assert int(accepted[index]) == sum(node < request.accepted for node in run)


def test_placeholders_say_nothing():
    """Drafts that are not ours have no origin, even if they were run and accepted."""
    verified = verified_of(
        [SimpleNamespace(origin=[], chance=[], run=4, accepted=2, temperatures=0.0)]
    )
    assert not verified.live.any() and not verified.judged.any()
    assert all(not values.any() for values in verified.of_drafter(0))


def survival_of(table, logprob, heat=0.0):
    """Of one tree, none of whose nodes is of a later block."""
    depth, origin = torch.ones(1, logprob.shape[1] + 1).long(), torch.ones_like(logprob).byte()
    slot, steps = torch.zeros(1, dtype=torch.int64), torch.empty_like(logprob)
    given = slot, logprob, torch.tensor([heat]), table.seen, steps
    write_survival(*given, Later(depth, origin, 1, 0))
    return steps.cumprod(1)


def test_before_anything_is_seen_scores_are_believed():
    chance = torch.tensor([[0.9, 0.5, 0.1, 0.0]])
    survival = survival_of(AcceptanceEstimator("cpu"), chance.log())
    torch.testing.assert_close(survival, chance, rtol=0.03, atol=0.02)


def learn(table, logprob, reached, judged):
    """Judged nodes are the drafters' own; any nodes may be reached."""
    count, nodes = logprob.shape
    accepted, run = reached.sum(1), torch.full((count,), nodes)
    path = (~reached).int().argsort(stable=True) + 1
    path = F.pad(path * (torch.arange(nodes) < accepted[:, None]), (1, 0))
    of_tree = logprob.contiguous(), judged.byte(), torch.zeros(count)
    table.learn_from(VerifiedTrees(torch.arange(count), run, accepted.int(), path, *of_tree))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_scores_are_learned_by_a_loop_as_by_torch(count, draw):
    seen = torch.full((2, 2, 2, NUM_BINS), 7.0)
    verified = verified_of(some_requests(count, draw))
    learn_scores.reference(seen[0], verified, 0.75)
    learn_scores_numba(seen[1], verified, 0.75)
    assert_equal(seen[1], seen[0])


def test_nodes_are_worth_what_such_nodes_were():
    table = AcceptanceEstimator("cpu")
    table.decay = 1.0
    logprob = torch.tensor([[-0.125, -1.125, -2.125]])  # the middles of bins
    rates = torch.tensor([[0.5, 0.3, 0.02]])  # of 400 trees
    reached = torch.arange(400)[:, None] < rates * 400
    learn(table, logprob.expand(400, -1), reached, torch.ones_like(reached))
    torch.testing.assert_close(survival_of(table, logprob), rates, atol=0.01, rtol=0.0)
    # Requests that sample are another matter.
    other = survival_of(table, logprob, 1.0)
    torch.testing.assert_close(other, logprob.exp(), atol=0.01, rtol=0.0)


@settings(deadline=None)
@given(st.data())
def test_rates_are_the_nearest_that_fall(data):
    table = AcceptanceEstimator("cpu")
    numbers = st.lists(st.floats(0, 50), min_size=NUM_BINS, max_size=NUM_BINS)
    middles = -(torch.arange(NUM_BINS) + 0.5) / BINS_PER_NAT
    for kind in range(2):
        table.seen.judged[kind] = torch.tensor(data.draw(numbers))
        table.seen.reached[kind] = table.seen.judged[kind] * torch.tensor(data.draw(numbers)) / 50
        wanted = torch.tensor(falling_rates(table.seen, kind))
        found = survival_of(table, middles[None], float(kind))[0]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_old_steps_fade_when_something_new_is_seen_and_unverified_nodes_do_not_count():
    table = AcceptanceEstimator("cpu")
    table.decay = 0.5
    logprob, seen = torch.tensor([[-0.1, -0.2, -torch.inf]]), torch.ones(1, 3).bool()
    for _ in range(2):
        learn(table, logprob, seen, torch.tensor([[True, False, True]]))
    assert table.seen.reached.sum() == table.seen.judged.sum() == 1.5
    learn(table, logprob, seen, ~seen)
    assert table.seen.reached.sum() == 1.5


HEAT = torch.tensor([0.0, 0.2, 0.8, 1.0, 2.0])


def test_before_anything_was_seen():
    """A hot target is flatter than its drafter, a cool one sharper, none more than a greedy one."""
    wanted = [GREEDY, GREEDY, SAMPLING / 0.8, SAMPLING, SAMPLING / 2]
    assert DraftCalibration("cpu").of(HEAT).tolist() == pytest.approx(wanted)


def serve(calibration, temperature, right, steps=1000, requests=4, seed=0):
    """Drafters that are certain of their order, but name probabilities p^(1/right).

    Every tree is a chain of 4 nodes, each of whose tokens is right with probability 0.8 given
    that those before are. The drafter says q for the token and (1 − q) for another, so that at
    β = `right` its scores are the truth.
    """
    draw = torch.Generator().manual_seed(seed)
    truth = torch.tensor([0.8, 0.2])
    said = (truth.log() / right).log_softmax(0)
    for _ in range(steps):
        beta = calibration.of(temperature.expand(requests))
        score = (said * beta[:, None]).log_softmax(1)[:, :1] * torch.arange(1, 5)
        hit = torch.rand(requests, 4, generator=draw) < truth[0]
        accepted = hit.int().cumprod(1).sum(1)
        live = torch.rand(requests, generator=draw) < 0.8
        expected = torch.where(live, score.exp().sum(1), float("nan"))
        calibration.learn(temperature.expand(requests), expected, accepted, live)
    return float(calibration.of(temperature.view(1)))


@pytest.mark.parametrize("right", [0.7, 1.0, 2.2])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_scores_come_to_add_up_to_what_is_accepted(temperature, right):
    calibration = DraftCalibration("cpu")
    if temperature:  # a greedy target bounds the others, and here it is known to be sharp
        serve(calibration, torch.tensor(0.0), 3.0)
    found = serve(calibration, torch.tensor(temperature), right)
    assert found == pytest.approx(right, rel=0.15)


@pytest.mark.parametrize(("heat", "moves"), [(0.0, 0), (1.0, 1), (0.1, 0)])
def test_greedy_and_sampling_requests_do_not_learn_from_each_other(heat, moves):
    """At a temperature near 0 the greedy target's β is used."""
    calibration = DraftCalibration("cpu")
    before = calibration.log.clone()
    heats, live = torch.full((3,), heat), torch.ones(3).bool()
    calibration.learn(heats, torch.ones(3), torch.full((3,), 5), live)
    assert calibration.log[moves] > before[moves] and calibration.trees[moves] == 3
    assert calibration.log[1 - moves] == before[1 - moves] and calibration.trees[1 - moves] == 0


def test_it_stays_within_its_range():
    calibration = DraftCalibration("cpu")
    all_live = torch.ones(64).bool()
    for heat in (0.0, 1.0):
        for accepted, bound in ((60, 4.0), (0, 0.25)):
            for _ in range(400):
                calibration.learn(
                    torch.full((64,), heat), torch.ones(64), torch.full((64,), accepted), all_live
                )
            assert float(calibration.of(torch.tensor([heat]))) == pytest.approx(bound, rel=1e-4)


def test_a_request_learns_a_factor_of_its_own():
    """Two of them, of which one accepts everything and the other nothing."""
    calibration, req_idx = DraftCalibration("cpu", num_slots=4), torch.tensor([2, 0])
    heat, live = torch.zeros(2), torch.ones(2).bool()
    for _ in range(30):
        calibration.learn(heat, torch.ones(2), torch.tensor([4, 0]), live, req_idx)
    usual = calibration.of(torch.zeros(1))
    one, other = calibration.of(heat, req_idx)
    assert one > 1.5 * usual and other < usual / 1.2
    assert calibration.of(torch.zeros(1), torch.tensor([1])) == usual  # an unused slot

    calibration.begin(2)
    assert calibration.of(heat, req_idx).tolist() == pytest.approx([float(usual), float(other)])
    calibration.forget()
    assert calibration.of(heat, req_idx).tolist() == pytest.approx([GREEDY, GREEDY])


def test_a_factor_stays_within_its_range_and_counts_live_trees():
    calibration, req_idx = DraftCalibration("cpu", num_slots=2), torch.tensor([0, 1])
    accepted, live = torch.tensor([60, 60]), torch.tensor([True, False])
    for _ in range(400):
        calibration.learn(torch.ones(2), torch.ones(2), accepted, live, req_idx)
    assert calibration.own.exp().tolist() == pytest.approx([4.0, 1])
    assert calibration.own_trees.tolist() == [RATES.own_memory, 0]


def test_how_sure_a_tree_is_of_the_next_token():
    token = torch.tensor([[5, 6, 7, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    parent = torch.tensor([[0, 0, 1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    share = torch.tensor([[0.5, 0.3, 0.25, 0], [0.9, 0, 0, 0], [0, 0, 0, 0]])
    trees = DraftTree.from_nodes(
        token, parent, share.log(), torch.tensor([3, 1, 0], dtype=torch.int32)
    )
    assert first_token(trees) == pytest.approx(torch.tensor([0.8, 0.9, 0.0]))


def test_before_anything_was_seen_a_lookup_is_believed():
    gate = DrafterGate()
    assert gate.expects(np.array([0.0])) == 1
    assert gate.expects(np.array([0.95])) < 0.1


@pytest.mark.parametrize(("right_at", "gain"), [(0.4, 1.3), (0.95, 1.3), (0.5, 0.0)])
def test_what_a_drafter_adds_is_learned(right_at, gain):
    """Lookups that say 0.9 and are right at another rate; a drafter gains where they are not."""
    gate, draw = DrafterGate(), np.random.default_rng(0)
    for step in range(400):
        right, asked = draw.random() < right_at, step % 3 == 0
        accepted = draw.integers(2, 6) if right else asked * draw.poisson(gain)
        found = np.array([0.9]), np.array([asked]), np.array([right]), np.array([accepted])
        gate.learn(*found)
    expected = (1 - right_at) * gain
    assert gate.expects(np.array([0.9, 0.9])) == pytest.approx(2 * expected, abs=0.25)
