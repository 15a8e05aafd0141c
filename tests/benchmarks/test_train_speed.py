"""Counted work against torch's own counter and against what the trainer really does."""

from __future__ import annotations

import json

import pytest
import torch
import train_speed
from lib.synthetic_training import (
    FAVOURITE,
    SHAPES,
    StillTeacher,
    make_drafter,
    make_text,
    online_teacher,
)
from lib.train_flops import drafter_flops, load_of, teacher_flops
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from vllm_specblock.train import attention
from vllm_specblock.train.config import TrainConfig, TrainError
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.specblock import Recipe, SpecBlockLearner

TINY, BLOCK = SHAPES["tiny"], 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drafter():
    return make_drafter(TINY)


def lesson_of(batch, seed):
    text = make_text(TINY, batch, 40, 0.9)
    teacher = StillTeacher(TINY, text, CPU, torch.float32)
    return TrainBatch(text, teacher.teach(text), teacher.embed, 0, seed)


def taught(drafter, batch, num_blocks, seed):
    """(the loss's outcome, its load) of one update with the rank loss."""
    train_batch, watch = lesson_of(batch, seed), train_speed.Watch()
    learner = SpecBlockLearner(drafter, Recipe(num_blocks, rank_from=0))
    learner.register_forward_hook(watch)
    outcome = learner(train_batch)
    (load,) = watch.loads(train_batch.batch.tokens == FAVOURITE, BLOCK)
    return outcome, load


def matrix_products(count: FlopCounterMode) -> int:
    return count.get_flop_counts()["Global"][torch.ops.aten.mm]


@pytest.mark.parametrize("num_blocks, seed", [(1, 0), (2, 1), (3, 2), (3, 7)])
def test_matrix_products_are_those_that_torch_counts(drafter, num_blocks, seed):
    # One window: nothing fills up, so all that runs is work.
    with FlopCounterMode(display=False) as count:
        outcome, load = taught(drafter, 1, num_blocks, seed)
        outcome.loss.backward()
    assert matrix_products(count) == drafter_flops(drafter, load).matmul


def test_attention_is_that_over_visible_pairs(drafter, monkeypatch):
    pairs, attend = [], attention.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        if is_causal:
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        pairs.append(int((attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0).sum()))
        return attend(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    config = drafter.config
    one = (1, config.num_attention_heads, 1, config.head_dim)
    for seed in (3, 4, 5):
        pairs.clear()
        _, load = taught(drafter, 1, 3, seed)
        assert len(pairs) == 3 * config.num_hidden_layers
        forward = sum(pairs) * sdpa_flop_count(one, one, one)
        assert drafter_flops(drafter, load).attention == 3 * forward


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_that_the_layers_see(drafter, seed):
    laid_out = []
    hook = drafter.input_layer.register_forward_pre_hook(
        lambda _, args: laid_out.append(len(args[0]))
    )
    outcome, load = taught(drafter, 5, 3, seed)
    hook.remove()
    assert load.laid_out == laid_out
    assert load.rows[0] == laid_out[0] == 5 * 39
    assert all(rows <= laid for rows, laid in zip(load.rows, laid_out))
    # Position 1 of a block starts from every row that has a label; the last rows have none.
    assert all(rows >= first for rows, first in zip(load.rows, outcome.seen[:, 0].tolist()))


def test_the_target_is_what_torch_counts():
    teacher = online_teacher(TINY, CPU, torch.float32)
    text = make_text(TINY, 2, 24, 0.5)
    with FlopCounterMode(display=False) as count:
        teacher.teach(text)
    flops = teacher_flops(teacher, 2, 24)
    assert matrix_products(count) == flops.matmul
    heads, width = TINY.target.num_attention_heads, TINY.target.head_dim
    one = (1, heads, 1, width)
    causal = int(torch.ones(24, 24).tril().sum())
    assert flops.attention == 2 * causal * TINY.target.num_hidden_layers * sdpa_flop_count(
        one, one, one
    )


def test_a_path_ends_where_the_drafter_is_wrong():
    right = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    load = load_of(right, [2], BLOCK)
    # Block 1, position k of row t drafts column t + 1 + k. Columns: 0 … 7, column 3 is wrong.
    # k = 1: rows 0–5; k = 2: not row 1; k = 3: not row 0 either, so 2–3; k = 4: row 2.
    assert load.num_positions[0] == [6, 4, 2, 1]
    # Block 2 starts from the rows whose second position counted: 0, 2, 3, 4.
    assert load.rows == [7, 4]


def trainer_of(updates, **options):
    here = "."
    config = TrainConfig(
        target=here,
        data=here,
        out=here,
        batch=2,
        length=40,
        steps=updates,
        rank_from=0,
        num_blocks=3,
        lr=train_speed._RATE,
        warmup=0,
        device="cpu",
        **options,
    )
    text = make_text(TINY, 2, 40, 0.7)
    teacher = StillTeacher(TINY, text, CPU, torch.bfloat16)
    return train_speed.make_trainer(config, TINY, teacher, text, CPU), text


def test_updates_leave_the_load_as_it_is():
    trainer, text = trainer_of(3)
    dist_model, optimizer = (
        trainer.train_states["drafter"].dist_model,
        trainer.train_states["drafter"].optimizer,
    )
    before = [weight.detach().clone() for weight in dist_model.parameters]
    watch = train_speed.Watch()
    dist_model.module.register_forward_hook(watch)
    seconds, memory, graphs = train_speed.run_updates(trainer, 1)
    assert len(seconds) == 3 and min(seconds) > 0 and memory is None and graphs == 0
    assert len(watch.loads(text.tokens == FAVOURITE, BLOCK)) == 3
    # Only weights of 0 can take in so small a step.
    assert all(
        torch.allclose(old, new, rtol=0, atol=1e-20)
        for old, new in zip(before, dist_model.parameters)
    )
    moments = [optimizer.state[weight]["exp_avg"] for weight in dist_model.parameters]
    assert all(moment.any() for moment in moments)  # the optimiser did run, over every weight


def test_other_choices_give_no_figures():
    trainer, text = trainer_of(1)
    module = trainer.train_states["drafter"].dist_model.module
    watch = train_speed.Watch()
    module.register_forward_hook(watch)
    with torch.no_grad():
        module.drafter.lm_head.weight[FAVOURITE] *= -1
    trainer.update()
    with pytest.raises(TrainError, match="does not choose"):
        watch.loads(text.tokens == FAVOURITE, BLOCK)


@pytest.mark.parametrize("with_target", [False, True])
def test_the_command_writes_its_figures(tmp_path, capsys, with_target):
    path = tmp_path / "speed.json"
    train_speed.main(
        "tiny",
        "cpu",
        blocks=2,
        updates=2,
        warmup=1,
        length=24,
        with_target=with_target,
        peak=2.0,
        json_path=path,
    )
    assert "tokens/s" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["device"] == "cpu" and found["runs"] == 2 and found["length"] == 24
    assert torch.__version__.startswith(found["versions"]["torch"])
    times = found["update_s"]
    assert times["least"] <= times["median"] <= times["most"]
    mean = (times["least"] + times["most"]) / 2
    assert found["tokens_per_s"] == pytest.approx(2 * 24 / mean)
    assert found["mfu"] == pytest.approx(found["flops_per_update"] / mean / 2e12)
    # A floor that needs no count of positions: the target's weights, two FLOPs per token each.
    decoder = 8 * (256 * (256 + 2 * 64 + 256) + 3 * 256 * 384)
    floor = 2 * 48 * decoder if with_target else 0
    assert found["flops_per_update"] > floor
