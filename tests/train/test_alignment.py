"""Training drafts as inference does: the same losses, row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.train_batches import lesson_of, packed

from vllm_specblock.train.config import Recipe, RunConfig, parse
from vllm_specblock.train.distributed import BatchCounts
from vllm_specblock.train.specblock import SpecBlockLearner, Unroll, outcome
from vllm_specblock.train.target.features import TargetOutputs
from vllm_specblock.train.train_state import TrainState

COLUMNS = 24
LENGTHS = ((12, 10), (20,))  # documents of the two windows


@pytest.fixture
def scene(lucky):
    """A drafter and a lesson: two documents in one window, a short one in the other."""

    def make(**changes):
        drafter, tokens = lucky(2, COLUMNS, **changes)
        loss_mask = torch.ones_like(tokens, dtype=torch.bool)
        loss_mask[0, :2] = False  # a prompt
        loss_mask[1, 5] = False
        return drafter, lesson_of(drafter, packed(tokens, loss_mask, LENGTHS))

    return make


def documents(train_batch):
    """(window, first column, tokens [T], counted [T], hidden [T, 3·H]) of every document."""
    for window, lengths in enumerate(LENGTHS):
        first = 0
        for length in lengths:
            here = slice(first, first + length)
            batch = train_batch.batch
            yield (
                window,
                first,
                batch.tokens[window, here],
                batch.loss_mask[window, here].tolist(),
                train_batch.target_outputs.hidden[window, here],
            )
            first += length


CASES = [
    (restart_positions, restart, valid, "base", "sdpa")
    for restart_positions in ([1], [3], [1, 2], [2, 1])
    for restart, valid in ((False, False), (False, True), (True, True))
]
CASES += [
    (restart_positions, True, True, rope, kernel)
    for restart_positions in ([4], [2, 1, 3])
    for rope in ("base", "path")
    for kernel in ("sdpa", "flex")
]


@pytest.mark.parametrize(("restart_positions", "restart", "valid", "rope", "kernel"), CASES)
@torch.no_grad()
def test_objective_is_the_loop_over_rows(
    scene, inference, restart_positions, restart, valid, rope, kernel
):
    """Eqs. 5-7 and the rank loss with labels, laws and cuts, from states of inference."""
    drafter, train_batch = scene(block_rope=rope)
    named = drafter.t2d.nonzero()[:, 0].tolist()
    losses_of = [[[] for _ in range(4)] for _ in range(len(restart_positions) + 1)]
    rank_losses = [[] for _ in losses_of]
    paths = torch.zeros(2, len(restart_positions) + 1, 4)  # right before; right here too
    for window, first, tokens, written, hidden in documents(train_batch):
        label = [
            named.index(token) if token in named and mine else None
            for token, mine in zip(tokens.tolist(), written)
        ] + [None] * 20
        for row, states in inference(drafter, train_batch.embed, tokens, hidden).blocks(
            restart_positions
        ):
            live = right = learned = written[row + 1]
            offset = 0
            for block, state in enumerate(states):
                masks = []
                for k in range(1, 5):
                    place = row + 1 + offset + k
                    right, learned = (m and label[place] is not None for m in (right, learned))
                    masks.append(learned)
                    if not learned:
                        continue
                    logits, rank_logits = drafter.heads(state[k - 1])
                    p = logits.double().softmax(-1).tolist()
                    r = 1 + sum(other > p[label[place]] for other in p)
                    bucket = 0 if r == 1 else 1 if r <= 4 else 2 if r <= 10 else 3
                    rank_losses[block].append(-rank_logits.double().log_softmax(-1)[bucket].item())
                    target_probs = train_batch.target_outputs.target_probs[
                        window, first + place - 1
                    ].tolist()
                    loss = -sum(a * math.log(b) for a, b in zip(target_probs, p))
                    losses_of[block][k - 1].append(loss)
                    paths[0, block, k - 1] += right
                    right = right and p.index(max(p)) == label[place]
                    paths[1, block, k - 1] += right
                    learned = right if valid else learned
                if block < len(restart_positions):
                    restart_position = restart_positions[block]
                    named_there = label[row + 1 + offset + restart_position] is not None
                    path_goes_on = masks[restart_position - 1]
                    after = live and named_there if restart or not valid else path_goes_on
                    right = learned = after
                    offset += restart_position
                    if not learned:
                        break
    assert len(losses_of[-1][0]) > 2  # the last block was reached

    recipe = Recipe(mask_restart=restart, valid_prefix=valid, rank_from=0)
    learner = SpecBlockLearner(drafter, recipe, kernel)
    blocks = Unroll(learner, train_batch).blocks(restart_positions)
    for block, positions in zip(blocks, losses_of):
        assert block.num_positions.tolist() == [len(losses) for losses in positions]
    rows = [losses for positions in losses_of for losses in positions]
    most = max(len(losses) for losses in rows)
    for floor in (0.0, 0.25, 0.6, 1.0):  # 0: eq. 6 as it is printed
        expected = sum(sum(losses) / max(len(losses), floor * most, 1) for losses in rows)
        expected += sum(sum(losses) / len(losses) for losses in rank_losses)
        result = outcome(blocks, len(restart_positions) + 1, floor, BatchCounts())
        assert result.loss.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(result.seen, paths[0]) and torch.equal(result.hits, paths[1])


def test_a_later_block_teaches_the_first(scene):
    """The condition of block 2 carries its gradient into block 1's query of the cut."""
    drafter, train_batch = scene()
    learner = SpecBlockLearner(drafter, Recipe(mask_restart=True))
    Unroll(learner, train_batch).blocks([1])[1].draft.sum().backward()
    assert drafter.input_layer.condition_proj.weight.grad.abs().sum() > 0


def test_without_a_live_path_the_later_blocks_are_left_out(scene):
    drafter, train_batch = scene()
    outside = (~drafter.t2d).nonzero()[0, 0]
    train_batch.batch.tokens.fill_(outside)
    learner = SpecBlockLearner(drafter, Recipe(rank_from=0))
    blocks = Unroll(learner, train_batch).blocks([2, 2])
    assert len(blocks) == 1
    assert outcome(blocks, 3, 0.25, BatchCounts()).loss == 0


def test_recomputing_changes_no_gradient(scene):
    """Activation checkpointing of the layers."""
    gradients = []
    for recompute in (False, True):
        drafter, train_batch = scene()
        recipe = Recipe(num_blocks=3, rank_from=0, recompute=recompute)
        SpecBlockLearner(drafter, recipe)(train_batch).loss.backward()
        gradients.append({n: p.grad for n, p in drafter.named_parameters() if p.grad is not None})
    plain, again = gradients
    assert plain.keys() == again.keys() and len(plain) > 20
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, msg=name)


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_micro_batches_add_up_to_the_batch(scene, floor):
    """Under the valid-prefix mask each of them counts other rows."""
    recipe, gradients = Recipe(rank_from=0, loss_floor=floor), []
    for micro in (2, 1):
        drafter, train_batch = scene()
        config = parse(RunConfig, target="T", data="D", out="O")
        train_state = TrainState(SpecBlockLearner(drafter, recipe), config)
        counts, parts = BatchCounts(2 // micro), []
        for first in range(0, 2, micro):
            here = slice(first, first + micro)
            outputs = TargetOutputs(*(rows[here] for rows in train_batch.target_outputs))
            part = replace(train_batch, batch=train_batch.batch[here], target_outputs=outputs)
            parts.append(replace(part, counts=counts))
        for part in parts if micro == 1 else ():
            train_state.count(part)
        counts.finish()
        for part in parts:
            train_state.learn(part, more_to_come=False)
        gradients.append({n: p.grad for n, p in drafter.named_parameters() if p.grad is not None})
    whole, summed = gradients
    assert whole.keys() == summed.keys() and "rank_head.0.weight" in whole and len(whole) > 10
    for name, gradient in whole.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(summed[name], gradient, atol=1e-5 * scale, rtol=1e-4, msg=name)
