"""A run of `specblock train` from its options to its folders."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from support.train_batches import packed
from support.training import VOCAB, equal, history, kill_at, save_tokens, weights
from transformers import LlamaForCausalLM

from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train import loop
from vllm_specblock.train.config import TrainConfig, TrainError, parse
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.data.packed_dataset import load_texts, token_counts
from vllm_specblock.train.data.shards import Text
from vllm_specblock.train.loop import Trainer
from vllm_specblock.train.optimizers import learning_rate
from vllm_specblock.train.run import build, prepare, train
from vllm_specblock.train.specblock import SpecBlockLearner
from vllm_specblock.train.target import feature_store, target_rows
from vllm_specblock.train.target.feature_store import Features, Origin

CPU = torch.device("cpu")
LENGTH = 24


def drafter_of(run):
    return run.train_state.learner.drafter


class TestResume:
    @pytest.mark.parametrize("killed_after", [1, 4])
    def test_a_killed_run_ends_where_an_unbroken_one_does(
        self, options, tmp_path, monkeypatch, killed_after
    ):
        whole = train(options(out=tmp_path / "whole"), progress=False)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            kill_at(patch, killed_after)
            train(options(), progress=False)
        resumed = train(options(), progress=False)
        assert equal(weights(whole), weights(resumed))
        assert history(whole) == history(resumed)
        assert [entry["step"] for entry in history(resumed)] == [2, 4, 6]

    def test_a_kill_while_saving_leaves_the_last_whole_save(self, options, monkeypatch):
        def write_half(_state, path):
            path.write_bytes(b"half")
            raise KeyboardInterrupt

        run = build(options(), CPU)
        run.update(), run.save(), run.update()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(loop.torch, "save", write_half)
            run.save()
        again = build(options(), CPU)
        again.restore()
        assert again.step == 1
        again.save()  # over a torn file of the old save

    def test_slices_of_time_end_where_an_unbroken_run_does(self, options, tmp_path, monkeypatch):
        """Half a minute an update, by a clock that only updates move; a minute a slice."""
        whole = train(options(out=tmp_path / "whole"), progress=False)
        clock = SimpleNamespace(now=100.0)
        inner = Trainer.update

        def update(self):
            inner(self)
            clock.now += 30.0

        monkeypatch.setattr(Trainer, "update", update)
        monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
        steps = []
        for minutes in (1, 1, 50):
            out = train(options(minutes=minutes, save_every=100), progress=False)
            state = torch.load(out / "training" / "state.pt", weights_only=True)
            steps.append((state["step"], state["seconds"]))
        assert steps == [(3, 90.0), (6, 180.0), (6, 180.0)]
        assert equal(weights(whole), weights(out)) and history(whole) == history(out)

    def test_a_state_of_another_run_is_refused(self, options, tmp_path):
        path = options().out / "training" / "state.pt"
        train(options(steps=2), progress=False)
        with pytest.raises(TrainError, match="steps = 2, not 3"):
            train(options(steps=3), progress=False)
        save_tokens(tmp_path / "other.safetensors", [torch.arange(24)])
        with pytest.raises(TrainError, match="was trained with different data"):
            train(options(steps=2, data=tmp_path / "other.safetensors"), progress=False)
        with pytest.raises(TrainError, match="holds a trained drafter"):
            train(options(steps=2), dry_run=True, progress=False)
        assert torch.load(path, weights_only=True)["step"] == 2
        train(options(steps=3), resume=False, progress=False)
        assert torch.load(path, weights_only=True)["step"] == 3
        torch.save({"options": "{}", "students": {}}, path)
        with pytest.raises(TrainError, match="is not a training state of this version"):
            train(options(steps=3), progress=False)
        path.write_bytes(b"half")
        with pytest.raises(TrainError, match=r"state\.pt is not a training state"):
            train(options(steps=3), progress=False)

    def test_a_new_start_deletes_the_old_run_at_once(self, options, monkeypatch):
        """Killed before its first save, it must not be taken for the old one."""
        held_out = options(hold_out=2, eval_every=1)
        out = train(held_out, progress=False)
        assert (out / "best").exists()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            kill_at(patch, 0)
            train(held_out, resume=False, progress=False)
        assert not (out / "training" / "state.pt").exists() and not (out / "best").exists()

    def test_training_goes_on_from_a_drafter(self, options, tmp_path):
        first = train(options(steps=1, out=tmp_path / "first"), progress=False)
        run = build(options(init=first, draft_vocab_size=10), CPU)
        assert equal(drafter_of(run).state_dict(), checkpoint.load(first).float().state_dict())


class TestLearning:
    def test_gradients_that_are_no_numbers_cost_an_update_each_and_then_the_run(
        self, options, monkeypatch
    ):
        run, forward = build(options(steps=100), CPU), SpecBlockLearner.forward

        def broken(self, train_batch):
            output = forward(self, train_batch)
            return output._replace(loss=output.loss * torch.nan) if train_batch.step else output

        monkeypatch.setattr(SpecBlockLearner, "forward", broken)
        run.update()
        learned = copy.deepcopy(run.train_state.learner.state_dict())
        for _ in range(19):
            run.update()
        assert run.train_state.lost == 19 and equal(run.train_state.learner.state_dict(), learned)
        with pytest.raises(TrainError, match="gradient has not been finite for 20 updates"):
            run.update()
        assert run.step == 20

    def test_it_learns(self, options):
        entries = history(train(options(steps=60, lr=3e-3, log_every=20), progress=False))
        first, last = (entry["loss"][0][0] for entry in (entries[0], entries[-1]))
        assert last < first - 0.1
        assert entries[-1]["rank_loss"] < entries[0]["rank_loss"]

    def test_the_rank_head_rests_until_rank_from(self, options):
        run = build(options(), CPU)
        before = drafter_of(run).rank_head[0].weight.detach().clone()
        run.update(), run.update()
        assert torch.equal(drafter_of(run).rank_head[0].weight, before)
        run.update()
        assert not torch.equal(drafter_of(run).rank_head[0].weight, before)

    def test_schedule(self, options):
        config = options(steps=1000, lr=1.0)
        rates = [learning_rate(config, step, 1000) for step in range(1000)]
        assert rates[:15] == pytest.approx([(step + 1) / 15 for step in range(15)])
        assert rates[15] == 1.0
        assert rates[15:] == sorted(rates[15:], reverse=True)
        assert rates[15 + 985 // 2] == pytest.approx(0.5, abs=1e-3)
        assert 0 < rates[-1] < 1e-5

    def test_bf16_keeps_float32_masters_and_the_target_frozen(self, options):
        run = build(options(precision="bf16"), CPU)
        before = [p.clone() for p in run.teacher.decoder.parameters()]
        run.update()
        assert {p.dtype for p in drafter_of(run).parameters()} == {torch.float32}
        assert run.teacher.decoder.dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(before, run.teacher.decoder.parameters()))

    def test_the_result_loads_and_is_bf16(self, options):
        out = train(options(), progress=False)
        drafter = checkpoint.load(out, torch.float32)
        for name, value in weights(out).items():
            assert torch.equal(drafter.state_dict()[name].float(), value.bfloat16().float()), name
        frequent = token_counts(load_texts(options().data, VOCAB), VOCAB).topk(8).indices
        assert drafter.t2d[frequent].all()
        assert drafter.config.target.layer_ids == (2, 3, 4)


def test_a_fresh_head_is_the_targets_with_its_norm_folded_in(options, tmp_path):
    target = LlamaForCausalLM.from_pretrained(options().target)
    with torch.no_grad():
        target.model.norm.weight.uniform_(0.5, 2.0)
    target.save_pretrained(tmp_path / "target")
    drafter = drafter_of(build(options(target=tmp_path / "target"), CPU))
    state = torch.randn(3, 32)
    wanted = target.lm_head(state * target.model.norm.weight)[:, drafter.t2d]
    torch.testing.assert_close(drafter.lm_head(state), wanted)


@torch.no_grad()
def test_the_teaching_is_what_the_target_says(options):
    """Two documents in one window: each as if it were alone."""
    run = build(options(), CPU)
    tokens = torch.randint(VOCAB, (1, 24))
    batch = packed(tokens, torch.ones_like(tokens, dtype=torch.bool), [(13, 9)])
    outputs = run.teacher.teach(batch)
    target = LlamaForCausalLM.from_pretrained(options().target)
    close = {"atol": 1e-4, "rtol": 1e-4}
    for here in (slice(0, 13), slice(13, 22)):
        output = target(input_ids=tokens[:, here], output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer][0] for layer in (2, 3, 4)], dim=-1)
        torch.testing.assert_close(outputs.hidden[0, here], states, **close)
        torch.testing.assert_close(outputs.last[0, here], output.hidden_states[-1][0], **close)
        probs = output.logits[0].softmax(-1)[:, drafter_of(run).t2d]
        probs = probs / probs.sum(-1, keepdim=True)
        torch.testing.assert_close(outputs.target_probs[0, here], probs, **close)


def test_ranks_that_do_not_fit_are_one_sentence(options, monkeypatch):
    monkeypatch.setattr(loop, "world", lambda: (0, 3))
    with pytest.raises(TrainError, match=r"shared by 3 devices .* multiple of 6"):
        build(options(micro_batch=2), CPU)


class TestHeldOut:
    def test_held_out_texts_teach_nothing(self, options, folder, tmp_path):
        texts = [text.tokens for text in shards.read_shard(folder / "d.safetensors")]
        texts[-3:] = [torch.randint(VOCAB, (LENGTH,)) for _ in range(3)]
        changed = tmp_path / "changed.safetensors"
        save_tokens(changed, texts)
        one = train(options(hold_out=3, eval_every=3), progress=False)
        other = train(options(hold_out=3, data=changed, out=tmp_path / "other"), progress=False)
        assert equal(weights(one), weights(other))
        assert [e["step"] for e in history(one) if "tau" in e] == [3, 6]

    def test_the_best_is_kept(self, options, monkeypatch):
        """By a judge who says 1.5, 2.5 and 2: the second drafter stays, also across a kill."""
        verdicts, judged = iter([1.5, 2.5, 2.0]), []

        def replay(make_draft, sequences, depth):
            drafter = make_draft.__self__.drafter
            judged.append({n: v.clone() for n, v in drafter.state_dict().items()})
            return SimpleNamespace(tau=next(verdicts))

        monkeypatch.setattr(loop, "replay", replay)
        config = options(hold_out=2, eval_every=2, save_every=1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            kill_at(patch, 5)
            train(config, progress=False)
        out = train(config, progress=False)
        assert len(judged) == 3
        best = checkpoint.load(out / "best", torch.float32).state_dict()
        assert all(torch.equal(best[n].float(), judged[1][n].bfloat16().float()) for n in best)
        assert not torch.equal(judged[1]["lm_head.weight"], judged[2]["lm_head.weight"])
        assert json.loads((out / "best" / "provenance.json").read_text())["step"] == 4
        assert json.loads((out / "provenance.json").read_text())["step"] == 6
        assert [e["tau"] for e in history(out) if "tau" in e] == [1.5, 2.5, 2.0]

    def test_too_many_and_too_short_ones_are_refused(self, options, folder, tmp_path):
        with pytest.raises(TrainError, match=r"hold_out is 40, but .* has only 40 sequences"):
            prepare(options(hold_out=40), CPU, 6)
        texts = [*shards.read_shard(folder / "d.safetensors")]
        short = [Text(text.tokens[:9], text.loss_mask[:9]) for text in texts[:2]]
        shards.write_shard(tmp_path / "short.safetensors", [*texts, *short])
        with pytest.raises(TrainError, match="None of the 2 held-out texts has 10 tokens"):
            train(options(data=tmp_path / "short.safetensors", hold_out=2), progress=False)


def test_a_dry_run_writes_a_drafter_and_no_state(options):
    out = train(options(seed=3, hold_out=2), dry_run=True, progress=False)
    fresh = drafter_of(build(options(seed=3), CPU)).bfloat16().state_dict()
    assert equal(checkpoint.load(out, torch.bfloat16).state_dict(), fresh)
    assert not (out / "training").exists() and not (out / "best").exists()
    assert json.loads((out / "provenance.json").read_text())["step"] == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init": "nowhere"}, "nowhere"),
        ({"device": "gpu"}, "The device gpu cannot be used"),
        ({"target": "nothing"}, "nothing"),
        ({"data": "text"}, "no data.json"),
        ({"out": "text/a.txt"}, "is a file, but must be a folder"),
    ],
)
def test_a_run_that_cannot_start_is_one_sentence(options, tmp_path, monkeypatch, changes, says):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TrainError, CheckpointError), match=says) as error:
        train(options(**changes), progress=False)
    assert "\n" not in str(error.value)


def test_stored_features_teach_what_the_target_does(options, folder, tmp_path):
    """Held-out texts included."""
    shared = {"hold_out": 2, "eval_every": 3}
    sequences = [text.tokens for text in shards.read_shard(folder / "d.safetensors")]
    teacher = build(options(**shared), CPU).teacher

    def extract(texts):
        for tokens in texts:  # each piece alone
            outputs = teacher.teach(Batch.of(tokens[None]))
            yield Features(outputs.hidden[0], outputs.last[0])

    origin = Origin(
        target_rows.fingerprint(folder / "target"),
        feature_store.fingerprint(sequences),
        (2, 3, 4),
        "float32",
        LENGTH,
        shard_tokens=60,
    )
    feature_store.fill(tmp_path / "features", origin, sequences, extract)
    online = train(options(**shared, out=tmp_path / "online"), progress=False)
    stored = train(options(**shared, features=tmp_path / "features"), progress=False)
    other = weights(stored)
    for name, value in weights(online).items():
        torch.testing.assert_close(other[name], value, atol=2e-5, rtol=1e-3, msg=name)
    one, two = ([e["tau"] for e in history(out) if "tau" in e] for out in (online, stored))
    assert len(one) == 2 and one == two


def test_a_resumed_run_shares_what_changes_the_numbers():
    needed = {"target": "T", "data": "D", "out": "O"}
    one = parse(TrainConfig, **needed)
    other = parse(TrainConfig, target="T2", data="D2", out="O2", minutes=3, save_every=7)
    assert one.must_match() == other.must_match()
    numbers = {"steps": 3, "batch": 8, "length": 64, "pack": False, "lr": 1.0, "warmup": 0.5}
    numbers |= {"clip": 1.0, "seed": 1, "precision": "fp32", "hold_out": 3, "num_blocks": 3}
    numbers |= {"rank_from": 1, "loss_floor": 0.0, "valid_prefix": False, "mask_restart": True}
    numbers |= {"weight_decay": 0.0, "block_size": 5, "rank_topk": 5, "optimizer": "muon"}
    for name, value in numbers.items():
        assert parse(TrainConfig, **needed | {name: value}).must_match() != one.must_match(), name
