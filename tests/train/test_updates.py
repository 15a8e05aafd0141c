"""One update: it drafts as inference does, its losses, optimisers, and what is logged."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from support.records import small_drafter
from support.train_batches import lesson_of, packed
from torch import nn

from vllm_specblock.drafters.common.linear import PackedLinear
from vllm_specblock.train import losses
from vllm_specblock.train.config import Recipe, RunConfig, TrainConfig, TrainError, parse
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.distributed import BatchCounts
from vllm_specblock.train.learner import IGNORE_INDEX, LossOutput
from vllm_specblock.train.losses import block_loss
from vllm_specblock.train.optimizers import make_optimizers, slow_arithmetic
from vllm_specblock.train.specblock import SpecBlockLearner, Unroll, outcome
from vllm_specblock.train.target.features import TargetOutputs
from vllm_specblock.train.train_state import MetricsLog, TrainState, describe

COLUMNS = 24
LENGTHS = ((12, 10), (20,))  # documents of the two windows
DOCUMENTS = ((0, 0, 12), (0, 12, 10), (1, 0, 20))
"""Window, first column and length of each."""


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
    for window, first, length in DOCUMENTS:
        here = window, slice(first, first + length)
        tokens, hidden = train_batch.batch.tokens[here], train_batch.target_outputs.hidden[here]
        written = train_batch.batch.loss_mask[here].tolist()
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
            hidden, last, head = train_batch.target_outputs
            outputs = TargetOutputs(hidden[here], last[here], head)
            whole = train_batch.batch
            batch = Batch(whole.tokens[here], whole.position[here], whole.loss_mask[here])
            part = replace(train_batch, batch=batch, target_outputs=outputs, counts=counts)
            parts.append(part)
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


@pytest.fixture
def block():
    """Arguments of `block_loss` for 40 rows whose labels are often the drafter's choice."""
    drafter = small_drafter()
    rows, K = 40, drafter.config.block_size
    hidden = torch.randn(rows, K, drafter.config.hidden_size, requires_grad=True)
    with torch.no_grad():
        choice = drafter.heads(hidden)[0].argmax(-1)
    label = choice.where(torch.rand(rows, K) < 0.7, torch.randint(14, (rows, K)))
    label = label.where(torch.rand(rows, K) < 0.9, IGNORE_INDEX)
    return {
        "drafter": drafter,
        "hidden": hidden,
        "label": label,
        "target_probs": torch.randn(30, 14).softmax(-1),
        "target_row": torch.randint(30, (rows, K)),
        "start": torch.rand(rows) < 0.8,
        "rank": True,
    }


def test_rejected_positions_alone(block):
    """Of each path its last position, where the choice is wrong; paths themselves are the same."""
    whole = block_loss(**block)
    loss = block_loss(**block, rejected_only=True)
    assert torch.equal(loss.on_path, whole.on_path) and torch.equal(loss.hit, whole.hit)
    wrong = whole.on_path & ~whole.hit
    assert loss.num_positions.tolist() == wrong.sum(0).tolist() and wrong.any(0).all()
    expected = [0.0] * 4
    for t, k in wrong.nonzero().tolist():
        logits = block["drafter"].heads(block["hidden"][t, k])[0]
        p = block["target_probs"][block["target_row"][t, k]]
        expected[k] -= float((p * logits.detach().log_softmax(-1)).sum())
    assert loss.draft.tolist() == pytest.approx(expected, rel=1e-5)
    assert 0 < loss.rank < whole.rank
    loss.draft.sum().backward()
    reached = block["hidden"].grad.abs().sum(-1) > 0
    assert torch.equal(reached, wrong)


def test_gradients_are_those_of_autograd(block, monkeypatch):
    monkeypatch.setattr(losses, "ROWS", 7)
    drafter, hidden = block["drafter"], block["hidden"]
    loss = block_loss(**block)
    parameters = [hidden, drafter.lm_head.weight, drafter.norm.weight]
    found = torch.autograd.grad(loss.draft.sum(), parameters)
    rows, k = loss.on_path.nonzero(as_tuple=True)
    log_probs = drafter.lm_head(drafter.norm(hidden[rows, k])).log_softmax(-1)
    p = block["target_probs"][block["target_row"][rows, k]]
    wanted = torch.autograd.grad(-(p * log_probs).sum(), parameters)
    for mine, other in zip(found, wanted):
        torch.testing.assert_close(mine, other)


def test_rank_gradient_stays_in_the_rank_head(block):
    block_loss(**block).rank.backward()
    reached = {n for n, p in block["drafter"].named_parameters() if p.grad is not None}
    assert reached == {"rank_head.0.weight", "rank_head.2.weight"}
    assert block["hidden"].grad is None


NEEDED = {"target": "T", "data": "D", "out": "O"}


@pytest.fixture
def small() -> nn.Module:
    torch.manual_seed(0)
    proj, head = nn.Linear(8, 6, bias=False), nn.Linear(6, 10, bias=False)
    return nn.Sequential(OrderedDict(proj=proj, norm=nn.RMSNorm(6), lm_head=head))


def muon(module: nn.Module, **options) -> list[torch.optim.Optimizer]:
    config = parse(TrainConfig, optimizer="muon", **NEEDED, **options)
    return make_optimizers(list(module.named_parameters()), config)


def test_matrices_between_states_are_muons_and_heads_are_not(small):
    inner, rest = muon(small, lr=1e-3, weight_decay=0.0)
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(small.proj.weight)]
    others = {id(p) for p in rest.param_groups[0]["params"]}
    assert others == {id(small.norm.weight), id(small.lm_head.weight)}
    before = {name: weight.detach().clone() for name, weight in small.named_parameters()}
    small(torch.randn(16, 8)).square().mean().backward()
    inner.step(), rest.step()
    moved = {
        n: (w.detach() - before[n]).square().mean().sqrt() for n, w in small.named_parameters()
    }
    assert moved["lm_head.weight"] == pytest.approx(1e-3, rel=0.1)  # Adam's first step
    # Orthogonal updates, scaled to AdamW's usual 0.2 of the rate per number.
    assert 0.5e-4 < moved["proj.weight"] < 4e-4


def test_muon_refuses_sharded_weights(small):
    with pytest.raises(TrainError, match="needs whole matrices"):
        muon(small, parallel="shard")


@pytest.mark.parametrize(
    ("precision", "optimizer", "changes"),
    [
        ("bf16", "adamw", "take precision fp32."),
        ("fp32", "muon", "take optimizer adamw."),
        ("bf16", "muon", "take precision fp32 and optimizer adamw."),
        ("fp32", "adamw", None),
    ],
)
def test_what_is_slow_on_a_processor_without_bfloat16(monkeypatch, precision, optimizer, changes):
    config = parse(TrainConfig, **NEEDED, precision=precision, optimizer=optimizer)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(PackedLinear, "packs", lambda: False)
    said = slow_arithmetic(config, cpu)
    assert said is None if changes is None else said.endswith(changes)
    assert slow_arithmetic(config, gpu) is None
    monkeypatch.setattr(PackedLinear, "packs", lambda: True)
    assert slow_arithmetic(config, cpu) is None


def output_of(ce_loss, hits, seen, rank) -> LossOutput:
    grids = [torch.tensor(grid, dtype=torch.float32) for grid in (ce_loss, hits, seen)]
    return LossOutput(torch.tensor(0.0), *grids, torch.tensor(rank))


def test_means_are_over_positions_since_the_last_entry():
    first = output_of([[8.0, 6.0], [2.0, 0.0]], [[4, 1], [1, 0]], [[8, 4], [2, 1]], 1.0)
    second = output_of([[4.0, 0.0], [0.0, 0.0]], [[2, 2], [0, 0]], [[4, 2], [0, 0]], 2.0)
    metrics_log = MetricsLog()
    metrics_log.add(first)
    metrics_log.add(second)
    entry = metrics_log.entry(step=7)
    assert entry["step"] == 7
    assert entry["loss"] == [[1.0, 1.0], [1.0, 0.0]]  # 12 / 12, 6 / 6, 2 / 2, nothing
    assert entry["alpha"] == [[0.5, 0.5], [0.5, 0.0]]  # 6 / 12, 3 / 6, 1 / 2, 0 / 1
    assert entry["accuracy"] == [[0.5, 0.25], [0.5, 0.0]]  # of 12 paths, of 2 paths
    assert entry["rank_loss"] == 1.5
    assert describe(entry) == "nats 1.00 rank 1.50 α% 50 50 | 50 0"
    metrics_log.add(second)
    assert metrics_log.entry(step=8)["alpha"] == [[0.5, 1.0], [0.0, 0.0]]
    assert [entry["step"] for entry in metrics_log.entries] == [7, 8]
