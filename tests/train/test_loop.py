from __future__ import annotations

import json

import pytest
import torch
from support.train_batches import packed
from support.training import VOCAB, save_tokens, short_run
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train import loop, specblock
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.packed_dataset import load_texts, token_counts
from vllm_specblock.train.loop import Trainer
from vllm_specblock.train.optimizers import learning_rate
from vllm_specblock.train.run import build, train


@pytest.fixture
def options(folder, tmp_path):
    def make(**changes):
        return short_run(folder, **{"out": tmp_path / "out", **changes})

    return make


def weights(out):
    state = torch.load(out / "training" / "state.pt", weights_only=True)
    model = state["students"]["drafter"]["model"]
    return {name.removeprefix("drafter."): value for name, value in model.items()}


def trainer(config):
    return build(config, torch.device("cpu"))


def drafter_of(run):
    return run.train_states["drafter"].learner.drafter


def history(out):
    entries = [json.loads(line) for line in (out / "training" / "log.jsonl").open()]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def stop_after(monkeypatch, updates):
    """A kill: nothing of the run is tidied up."""
    inner = Trainer.update

    def update(self):
        if self.step == updates:
            raise KeyboardInterrupt
        inner(self)

    monkeypatch.setattr(Trainer, "update", update)


@pytest.mark.parametrize("killed_after", [1, 4, 5])
def test_a_killed_run_ends_where_an_unbroken_one_does(options, tmp_path, monkeypatch, killed_after):
    whole = train(options(out=tmp_path / "whole"), progress=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, killed_after)
        train(options(), progress=False)
    resumed = train(options(), progress=False)
    expected, found = weights(whole), weights(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert history(whole) == history(resumed)
    assert [entry["step"] for entry in history(resumed)] == [2, 4, 6]


@pytest.mark.parametrize("torn", ["state", "drafter"])
def test_a_kill_while_saving_leaves_the_last_whole_save(options, monkeypatch, torn):
    run = trainer(options())
    run.update()
    run.save()
    before = {path: path.read_bytes() for path in options().out.rglob("*.*") if path.is_file()}
    run.update()

    def write_half(*arguments, **_):
        if torn == "state":
            arguments[1].write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if torn == "state":
            patch.setattr(loop.torch, "save", write_half)
        else:
            patch.setattr(specblock.drafter_files, "save", write_half)
        run.save()
    assert (options().out / "training" / "state.pt").read_bytes() == before[
        options().out / "training" / "state.pt"
    ]
    again = trainer(options())
    again.restore()
    assert again.step == 1
    again.save()  # a torn file of the old save is in nobody's way


def test_no_resume_starts_anew(options):
    train(options(steps=2), progress=False)
    with pytest.raises(TrainError, match="steps = 2, not 3"):
        train(options(steps=3), progress=False)
    out = train(options(steps=3), resume=False, progress=False)
    assert torch.load(out / "training" / "state.pt", weights_only=True)["step"] == 3


def test_other_data_is_not_resumed_on(options, tmp_path):
    train(options(steps=1), progress=False)
    save_tokens(tmp_path / "other.safetensors", [torch.arange(24)])
    with pytest.raises(TrainError, match="was trained on other data"):
        train(options(steps=1, data=tmp_path / "other.safetensors"), progress=False)


def test_a_torn_state_is_named(options):
    train(options(steps=1), progress=False)
    (options().out / "training" / "state.pt").write_bytes(b"half")
    with pytest.raises(TrainError, match=r"state\.pt is no training state"):
        train(options(steps=1), progress=False)


def test_it_learns(options):
    entries = history(train(options(steps=60, lr=3e-3, log_every=20), progress=False))
    first, last = (entry["loss"][0][0] for entry in (entries[0], entries[-1]))
    assert last < first - 0.1
    assert entries[-1]["rank_loss"] < entries[0]["rank_loss"]


def test_the_rank_head_rests_until_rank_from(options):
    run = trainer(options())
    before = drafter_of(run).rank_head[0].weight.detach().clone()
    run.update()
    run.update()
    assert torch.equal(drafter_of(run).rank_head[0].weight, before)
    run.update()
    assert not torch.equal(drafter_of(run).rank_head[0].weight, before)


def test_the_result_loads_and_is_bf16(options):
    out = train(options(), progress=False)
    drafter = checkpoint.load(out, torch.float32)
    for name, value in weights(out).items():
        assert torch.equal(drafter.state_dict()[name].float(), value.bfloat16().float()), name
    texts = load_texts(options().data, None, VOCAB)
    frequent = token_counts(texts, VOCAB).topk(8).indices
    assert drafter.t2d[frequent].all()
    assert drafter.config.target.layer_ids == (2, 3, 4)


def test_a_fresh_head_is_the_targets_with_its_norm_folded_in(options, tmp_path):
    target = LlamaForCausalLM.from_pretrained(options().target)
    with torch.no_grad():
        target.model.norm.weight.uniform_(0.5, 2.0)
    target.save_pretrained(tmp_path / "target")
    drafter = drafter_of(trainer(options(target=tmp_path / "target")))
    state = torch.randn(3, 32)
    wanted = target.lm_head(state * target.model.norm.weight)[:, drafter.t2d]
    torch.testing.assert_close(drafter.lm_head(state), wanted)


def test_a_head_from_scratch_knows_nothing_of_the_target(options):
    heads = [
        drafter_of(trainer(options(lm_head=of))).lm_head.weight for of in ("target", "scratch")
    ]
    assert heads[0].shape == heads[1].shape
    correlation = torch.nn.functional.cosine_similarity(*(head.flatten() for head in heads), dim=0)
    assert correlation.abs() < 0.1 and heads[1].std() > 0


def test_the_shift_has_a_rate_of_its_own(options):
    """Adam's first update moves every weight by its rate, whatever the gradient's size."""
    run = trainer(options(shift_lr=0.1, warmup=0.0, weight_decay=0.0))
    before = {name: weight.clone() for name, weight in drafter_of(run).named_parameters()}
    run.update()
    moved = {n: (w - before[n]).abs().max().item() for n, w in drafter_of(run).named_parameters()}
    assert moved["shift_proj.0.weight"] == pytest.approx(1e-4, rel=0.01)
    assert moved["input_layer.fuse.weight"] == pytest.approx(1e-3, rel=0.01)
    run.save()
    again = trainer(options(shift_lr=0.1, warmup=0.0, weight_decay=0.0))
    again.restore()
    for here in (run, again):
        here.update()
    for name, weight in drafter_of(run).named_parameters():
        assert torch.equal(weight, drafter_of(again).state_dict()[name])


def test_a_state_without_a_newer_option_is_of_its_default(options):
    train(options(steps=1), progress=False)
    path = options().out / "training" / "state.pt"
    state = torch.load(path, weights_only=True)
    of_then = json.loads(state["options"])
    del of_then["shift_lr"]
    torch.save(state | {"options": json.dumps(of_then)}, path)
    trainer(options(steps=1)).restore()
    with pytest.raises(TrainError, match=r"shift_lr = 1\.0, not 0\.5"):
        trainer(options(steps=1, shift_lr=0.5)).restore()


def test_training_goes_on_from_a_drafter(options, tmp_path):
    first = train(options(steps=1, out=tmp_path / "first"), progress=False)
    run = trainer(options(init=first, draft_vocab_size=10))
    started = checkpoint.load(first)
    assert all(
        torch.equal(drafter_of(run).state_dict()[name], value)
        for name, value in started.state_dict().items()
    )


def test_bf16_keeps_float32_masters(options):
    run = trainer(options(precision="bf16"))
    run.update()
    assert {p.dtype for p in drafter_of(run).parameters()} == {torch.float32}
    assert run.teacher.decoder.dtype == torch.bfloat16


def test_the_frozen_target_stays(options):
    run = trainer(options())
    before = [p.clone() for p in run.teacher.decoder.parameters()]
    run.update()
    assert all(torch.equal(a, b) for a, b in zip(before, run.teacher.decoder.parameters()))


@torch.no_grad()
def test_the_teaching_is_what_the_target_says(options):
    """Two documents in one window: each as if it were alone."""
    run = trainer(options())
    tokens = torch.randint(VOCAB, (1, 24))
    batch = packed(tokens, torch.ones_like(tokens, dtype=torch.bool), [(13, 9)])
    target_outputs = run.teacher.teach(batch)
    target = LlamaForCausalLM.from_pretrained(options().target)
    for here in (slice(0, 13), slice(13, 22)):
        output = target(input_ids=tokens[:, here], output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer][0] for layer in (2, 3, 4)], dim=-1)
        close = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(target_outputs.hidden[0, here], states, **close)
        torch.testing.assert_close(
            target_outputs.last[0, here], output.hidden_states[-1][0], **close
        )
        target_probs = output.logits[0].softmax(-1)[:, drafter_of(run).t2d]
        torch.testing.assert_close(
            target_outputs.target_probs[0, here],
            target_probs / target_probs.sum(-1, keepdim=True),
            **close,
        )


def test_schedule(options):
    config = options(steps=1000, lr=1.0)
    rates = [learning_rate(config, step, 1000) for step in range(1000)]
    assert rates[:15] == pytest.approx([(step + 1) / 15 for step in range(15)])
    assert rates[15] == 1.0
    assert rates[15:] == sorted(rates[15:], reverse=True)
    assert rates[15 + 985 // 2] == pytest.approx(0.5, abs=1e-3)
    assert 0 < rates[-1] < 1e-5


class TestCommand:
    @pytest.fixture
    def call(self, folder, tmp_path):
        def call(*arguments, data=folder / "d.safetensors", target=folder / "target"):
            paths = ["--target", target, "--data", data, "--out", tmp_path / "out"]
            return CliRunner().invoke(app, ["train", *(str(part) for part in (*paths, *arguments))])

        return call

    def test_trains(self, call, tmp_path):
        result = call("--steps", 1, "--batch", 2, "--length", 24, "--draft-vocab-size", 20)
        assert result.exit_code == 0, result.output
        assert checkpoint.read_config(tmp_path / "out").draft_vocab_size == 20

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--lr", "0"], "Option lr"),
            (["--length", "9", "--block-size", "8"], "length 9 holds no whole block"),
            (["--batch", "8", "--micro-batch", "3"], "batch 8 is no multiple of micro_batch 3"),
            (["--init", "nowhere"], "nowhere"),
            (["--device", "gpu"], "gpu"),
        ],
    )
    def test_wrong_options_are_one_sentence(self, call, arguments, reason):
        result = call(*arguments)
        assert result.exit_code == 1
        message = result.stderr.strip().splitlines()[-1]
        assert message.startswith("Error: ") and reason in message

    def test_a_broken_line_is_one_sentence(self, call, tmp_path):
        broken = tmp_path / "d.jsonl"
        broken.write_text('{"input_ids": [1, 2, 3, 4, 5, 6]}\n{"inp\n')
        result = call(data=broken)
        assert result.exit_code == 1
        assert f"Error: {broken}:2 is not JSON" in result.stderr

    def test_a_missing_target_is_one_sentence(self, call, tmp_path):
        result = call(target=tmp_path / "nothing")
        assert result.exit_code == 1
        assert "Error: " in result.stderr and "nothing" in result.stderr

    def test_text_needs_a_tokenizer(self, call, tmp_path):
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "a.txt").write_text("some text")
        result = call(data=tmp_path / "text")
        assert result.exit_code == 1
        assert "has no tokenizer" in result.stderr
