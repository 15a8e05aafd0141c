"""A run of `specblock train` from its options to its folders."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from support.training import VOCAB, save_tokens, short_run
from transformers import LlamaForCausalLM

from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train import loop
from vllm_specblock.train.config import TrainError, parse
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.shards import Text
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.loop import Trainer
from vllm_specblock.train.run import build, prepare, prompt_of, train
from vllm_specblock.train.target import feature_store, target_rows
from vllm_specblock.train.target.feature_store import Features, Origin
from vllm_specblock.train.train_state import TrainState

CPU = torch.device("cpu")
LENGTH = 24


@pytest.fixture
def options(folder, tmp_path):
    def make(**changes):
        return short_run(folder, **{"out": tmp_path / "out", "save_every": 100, **changes})

    return make


@pytest.fixture
def uneven(tmp_path):
    """Sequences of many lengths, some longer than a window, with a prompt before and between."""
    draw = torch.Generator().manual_seed(5)
    pattern = torch.randint(VOCAB, (12,), generator=draw)
    texts = []
    for size in (24, 9, 15, 31, 7, 24, 12, 11, 20, 50, 24, 24):
        place = torch.arange(size)
        loss_mask = (place >= size % 4) & ((place < 10) | (place > 12))
        texts.append(Text(pattern.repeat(5)[size % 12 :][:size], loss_mask))
    shards.write_shard(tmp_path / "uneven.safetensors", texts)
    return tmp_path / "uneven.safetensors"


def weights(out):
    state = torch.load(out / "training" / "state.pt", weights_only=True)
    return state["students"]["drafter"]["model"]


def history(out):
    entries = [json.loads(line) for line in (out / "training" / "log.jsonl").open()]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def gradients(config, monkeypatch, learned: Trainer) -> dict[str, torch.Tensor]:
    """Of the update after those of `learned`, from its weights, before clipping."""
    found = {}

    def step(self, rate, clip):
        named = self.learner.named_parameters()
        found.update((name, p.grad.clone()) for name, p in named if p.grad is not None)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "step", step)
        run = build(config, CPU)
        weights = learned.train_states["drafter"].learner.state_dict()
        run.train_states["drafter"].learner.load_state_dict(weights)
        run.step = learned.step
        run.update()
    return found


class TestMicroBatches:
    @pytest.fixture
    def spoken(self, folder, tmp_path):
        """What the target itself says, greedily: texts of unequal lengths."""
        target = LlamaForCausalLM.from_pretrained(folder / "target")
        first = torch.arange(12)[:, None]
        said = target.generate(first, do_sample=False, max_new_tokens=23, min_new_tokens=23)
        sizes = (24, 9, 15, 24, 12, 24, 11, 20, 24, 13, 24, 24)
        save_tokens(tmp_path / "d.safetensors", [t[:size] for t, size in zip(said, sizes)])
        return tmp_path / "d.safetensors"

    @pytest.fixture
    def learned(self, options, spoken):
        """A run that gets some positions right."""
        run = build(options(data=spoken, steps=100, lr=1e-2, rank_from=0), CPU)
        while run.step < 25:
            run.update()
        loss_mask = run.train_states["drafter"].metrics_log.grid[1]
        assert (loss_mask[:, :3] > 0).all() and loss_mask[0, 1] < 0.9 * loss_mask[0, 0]
        return run

    @pytest.mark.parametrize("floor", [0.0, 0.25, 1.0])
    def test_they_add_up_to_the_batch(self, options, spoken, learned, monkeypatch, floor):
        """Under the valid-prefix mask every micro-batch counts other rows."""
        same = {"data": spoken, "steps": 100, "lr": 1e-2, "rank_from": 0, "loss_floor": floor}
        whole, *parts = (
            gradients(options(**same, micro_batch=micro), monkeypatch, learned)
            for micro in (None, 2, 1)
        )
        assert "drafter.rank_head.0.weight" in whole and len(whole) > 10
        for part in parts:
            assert whole.keys() == part.keys()
            for name, gradient in whole.items():
                scale = float(gradient.abs().max())
                torch.testing.assert_close(part[name], gradient, atol=1e-5 * scale, rtol=1e-4)

    def test_the_log_counts_all_of_them(self, options):
        plain = {"num_blocks": 1, "valid_prefix": False, "log_every": 1, "steps": 1}
        one, four = (build(options(**plain, micro_batch=micro), CPU) for micro in (None, 1))
        one.update(), four.update()
        sums = [run.train_states["drafter"].metrics_log.grid for run in (one, four)]
        assert torch.equal(sums[0][1:], sums[1][1:])
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4)

    def test_ranks_that_do_not_fit_are_one_sentence(self, options, monkeypatch):
        monkeypatch.setattr(loop, "world", lambda: (0, 3))
        with pytest.raises(TrainError) as error:
            build(options(micro_batch=2), CPU)
        assert str(error.value) == (
            "A batch of 4 windows cannot be shared by 3 devices that take 2 at once: make batch a "
            "multiple of 6."
        )


class TestHeldOut:
    @pytest.fixture
    def changed(self, folder, tmp_path):
        """The data with other sequences at its end."""
        texts = [text.tokens for text in shards.read_shard(folder / "d.safetensors")]
        texts[-3:] = [torch.randint(VOCAB, (LENGTH,)) for _ in range(3)]
        save_tokens(tmp_path / "changed.safetensors", texts)
        return tmp_path / "changed.safetensors"

    def test_held_out_texts_teach_nothing(self, options, changed, tmp_path):
        one = train(options(hold_out=3, eval_every=3), progress=False)
        other = train(options(hold_out=3, data=changed, out=tmp_path / "other"), progress=False)
        assert equal(weights(one), weights(other))
        assert [e["step"] for e in history(one) if "tau" in e] == [3, 6]
        seen = train(options(data=changed, out=tmp_path / "seen", epochs=1, steps=None))
        all_of_it = train(options(out=tmp_path / "all", epochs=1, steps=None))
        assert not equal(weights(seen), weights(all_of_it))

    def test_no_window_holds_them_and_scripts_do(self, options, changed):
        run = build(options(hold_out=3, data=changed), CPU)
        segments = [segment for window in run.windows.plan for segment in window]
        assert {segment.sequence for segment in segments} == set(range(37))
        texts = list(shards.read_shard(changed))
        assert len(run.sequences) == 3
        for sequence, text in zip(run.sequences, texts[37:]):
            assert torch.equal(sequence.tokens, text.tokens.long())
            assert sequence.prompt == LENGTH // 4  # counted whole: a share of it is the prompt

    def test_prompts_are_what_the_target_did_not_write(self):
        loss_mask = torch.tensor([0, 0, 0, 1, 1, 0]).bool()
        assert prompt_of(Text(torch.arange(6), loss_mask)) == 3

    def test_too_many_are_one_sentence(self, options):
        with pytest.raises(TrainError, match=r"hold_out is 40, but .* has only 40 sequences"):
            prepare(options(hold_out=40), CPU, 6)

    def test_the_best_is_kept(self, options, monkeypatch):
        """By a judge who says 1.5, 2.5 and 2: the second drafter stays, also across a kill."""
        verdicts, judged = iter([1.5, 2.5, 2.0]), []

        def mean_tau(make_draft, sequences, depth):
            drafter = make_draft.__self__.drafter
            judged.append({n: v.clone() for n, v in drafter.state_dict().items()})
            return next(verdicts), 1

        def update(self, inner=Trainer.update):
            if self.step == 5 and len(judged) == 2:
                raise KeyboardInterrupt
            inner(self)

        monkeypatch.setattr(loop, "mean_tau", mean_tau)
        config = options(hold_out=2, eval_every=2, save_every=1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Trainer, "update", update)
            train(config, progress=False)
        out = train(config, progress=False)
        assert len(judged) == 3
        best = checkpoint.load(out / "best", torch.float32).state_dict()
        assert all(torch.equal(best[n].float(), judged[1][n].bfloat16().float()) for n in best)
        assert not torch.equal(judged[1]["lm_head.weight"], judged[2]["lm_head.weight"])
        assert json.loads((out / "best" / "provenance.json").read_text())["step"] == 4
        assert json.loads((out / "provenance.json").read_text())["step"] == 6
        assert [e["tau"] for e in history(out) if "tau" in e] == [1.5, 2.5, 2.0]


def test_a_run_in_slices_of_time_ends_where_an_unbroken_one_does(options, tmp_path, monkeypatch):
    """Half a minute an update, by a clock that only updates move; a minute a slice."""
    whole = train(options(out=tmp_path / "whole"), progress=False)
    clock = SimpleNamespace(now=100.0)

    def update(self, inner=Trainer.update):
        inner(self)
        clock.now += 30.0

    monkeypatch.setattr(Trainer, "update", update)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    steps = []
    for minutes in (1, 1, 50):
        out = train(options(minutes=minutes), progress=False)
        state = torch.load(out / "training" / "state.pt", weights_only=True)
        steps.append((state["step"], state["seconds"]))
    assert steps == [(3, 90.0), (6, 180.0), (6, 180.0)]
    assert equal(weights(whole), weights(out))
    assert history(whole) == history(out)


def test_the_provenance_lies_beside_each_checkpoint(options, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/specblock", "train", "r.yaml"])
    out = train(options(steps=2, hold_out=2, eval_every=1), progress=False)
    for folder in (out, out / "best"):
        facts = json.loads((folder / "provenance.json").read_text())
        assert facts["command"] == "specblock train r.yaml"
        assert torch.__version__.startswith(facts["versions"]["torch"])
        assert "git" in facts and facts["ranks"] == 1 and facts["device"] == "cpu"
        assert facts["options"]["lr"] == 1e-3 and facts["options"]["batch"] == 4
        assert parse(**facts["options"]) == options(steps=2, hold_out=2, eval_every=1)
        assert 1 <= facts["step"] <= 2


def test_a_dry_run_writes_a_drafter_and_no_state(options):
    out = train(options(seed=3, hold_out=2), dry_run=True, progress=False)
    fresh = build(options(seed=3), CPU).train_states["drafter"].learner.drafter
    written = checkpoint.load(out, torch.float32).state_dict()
    for name, value in fresh.state_dict().items():
        assert torch.equal(written[name].float(), value.bfloat16().float()), name
    assert not (out / "training").exists() and not (out / "best").exists()
    assert json.loads((out / "provenance.json").read_text())["step"] == 0


def test_a_dry_run_leaves_a_drafter_that_has_learned(options):
    out = train(options(), progress=False)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(TrainError, match=r"holds a drafter that has learned; .* another --out"):
        train(options(), dry_run=True, progress=False)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_new_start_forgets_the_old_run_at_once(options, monkeypatch):
    """Killed before its first save, it must not be taken for the old one."""
    out = train(options(hold_out=2, eval_every=1), progress=False)
    assert (out / "best").exists()

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "update", killed)
        train(options(hold_out=2, eval_every=1), resume=False, progress=False)
    assert not (out / "training" / "state.pt").exists() and not (out / "best").exists()


def test_held_out_texts_that_are_too_short_are_one_sentence(options, folder, tmp_path):
    texts = [*shards.read_shard(folder / "d.safetensors")]
    short = [Text(text.tokens[:9], text.loss_mask[:9]) for text in texts[:2]]
    shards.write_shard(tmp_path / "short.safetensors", [*texts, *short])
    with pytest.raises(TrainError, match="None of the 2 held-out texts goes on for 10 tokens"):
        train(options(data=tmp_path / "short.safetensors", hold_out=2), progress=False)


def test_a_file_in_the_way_is_one_sentence(options):
    options().out.write_text("")
    with pytest.raises(TrainError, match="is a file, but the drafter goes to a folder"):
        train(options(), progress=False)


class TestFeatures:
    @pytest.fixture
    def features(self, folder, uneven, tmp_path):
        """Each piece alone through the target, as transformers gives it."""
        target = LlamaForCausalLM.from_pretrained(folder / "target").eval()
        sequences = [text.tokens for text in shards.read_shard(uneven)]

        @torch.no_grad()
        def extract(texts):
            for tokens in texts:
                states = target(input_ids=tokens[None], output_hidden_states=True).hidden_states
                yield Features(torch.cat([states[i][0] for i in (2, 3, 4)], -1), states[-1][0])

        origin = Origin(
            target_rows.fingerprint(folder / "target"),
            feature_store.fingerprint(sequences),
            (2, 3, 4),
            "float32",
            LENGTH,
            shard_tokens=60,
        )
        feature_store.fill(tmp_path / "features", origin, sequences, extract)
        return tmp_path / "features"

    def test_they_teach_what_the_target_does(self, options, uneven, features, tmp_path):
        """Packed windows and held-out texts included."""
        shared = {"data": uneven, "hold_out": 2, "eval_every": 3}
        online = train(options(**shared, out=tmp_path / "online"), progress=False)
        stored = train(options(**shared, features=features), progress=False)
        fresh = build(options(**shared), CPU).train_states["drafter"].learner.state_dict()
        mine, other = weights(online), weights(stored)
        for name, value in mine.items():
            torch.testing.assert_close(other[name], value, atol=2e-5, rtol=1e-3, msg=name)
        moved = {name for name, value in mine.items() if not torch.equal(value, fresh[name])}
        assert len(moved) > 10
        one, two = ([e["tau"] for e in history(out) if "tau" in e] for out in (online, stored))
        assert len(one) == 2 and one == two

    def test_of_other_data_they_are_refused(self, options, features):
        with pytest.raises(TrainError, match="are of other data"):
            train(options(features=features), progress=False)


def whole_epoch(config):
    """Trainer, and the outcome of all its windows at once."""
    run = build(config, CPU)
    batch = run.windows.of(range(len(run.windows)))
    train_batch = TrainBatch(batch, run.teacher.teach(batch), run.teacher.embed, step=9, seed=4)
    return run, run.train_states["drafter"].learner(train_batch)


def test_packing_changes_the_windows_and_nothing_else(options, uneven):
    (packed, one), (apart, other) = (
        whole_epoch(options(data=uneven, pack=pack, mask_restart=True)) for pack in (True, False)
    )
    assert len(packed.windows) < len(apart.windows)
    segments = [sorted(p for w in run.windows.plan for p in w) for run in (packed, apart)]
    assert segments[0] == segments[1]
    for name in ("num_positions", "hits", "seen"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.seen[1].sum() > 0  # block 2 was reached
    torch.testing.assert_close(one.ce_loss, other.ce_loss, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-4, atol=1e-4)


def test_prompt_tokens_give_no_gradient(options, uneven):
    """Noise in the law of every token of a prompt changes no bit of it."""
    config = options(data=uneven, num_blocks=2, valid_prefix=False)

    def gradients_with(spoil: str | None) -> torch.Tensor:
        run = build(config, CPU)
        batch = run.windows.of(range(len(run.windows)))
        target_outputs = run.teacher.teach(batch)
        if spoil:
            learned = batch.loss_mask if spoil == "answers" else ~batch.loss_mask
            # The law of a token stands one column before it; no token follows the last column.
            where = torch.cat([learned[:, 1:], torch.zeros_like(learned[:, :1])], dim=1)
            noise = torch.rand_like(target_outputs.target_probs)
            target_probs = torch.where(
                where[..., None], noise / noise.sum(-1, keepdim=True), target_outputs.target_probs
            )
            target_outputs = target_outputs._replace(target_probs=target_probs)
        learner = run.train_states["drafter"].learner
        learner(
            TrainBatch(batch, target_outputs, run.teacher.embed, step=9, seed=4)
        ).loss.backward()
        return torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])

    clean = gradients_with(None)
    assert torch.equal(gradients_with("prompts"), clean)
    assert not torch.allclose(gradients_with("answers"), clean)


def test_the_mask_decides_what_is_learned(options, uneven, tmp_path):
    """The same tokens with every one counted teach something else, and more of it."""
    texts = [text.tokens for text in shards.read_shard(uneven)]
    save_tokens(tmp_path / "unmasked.safetensors", texts)
    masked, unmasked = (
        whole_epoch(options(data=data, valid_prefix=False, num_blocks=1))[1]
        for data in (uneven, tmp_path / "unmasked.safetensors")
    )
    # Position 1 of a row: its root is counted, and so is the token after it. Row 0's root is x_1.
    first = sum(int((text.loss_mask[2:] & text.loss_mask[1:-1]).sum()) for text in segments(uneven))
    assert masked.num_positions[0, 0] == first
    assert unmasked.num_positions[0, 0] == sum(len(text.tokens) - 2 for text in segments(uneven))
    assert masked.num_positions[0, 0] < unmasked.num_positions[0, 0]


def segments(path):
    """Texts cut to windows, those without a row left out."""
    for text in shards.read_shard(path):
        for start in range(0, len(text.tokens), LENGTH):
            here = slice(start, start + LENGTH)
            if len(text.tokens[here]) >= 6:
                yield Text(text.tokens[here], text.loss_mask[here])


def test_a_tracker_that_is_not_installed_stops_the_run(options, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainError, match="needs the package wandb"):
        train(options(track="wandb"), progress=False)
