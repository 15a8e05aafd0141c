from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from vllm_specblock.cli.main import app
from vllm_specblock.draft import checkpoint
from vllm_specblock.train import data, loop
from vllm_specblock.train.config import TrainError, parse
from vllm_specblock.train.features import teach
from vllm_specblock.train.loop import Trainer, learning_rate, train

VOCAB = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random target, and text of a repeating pattern that can be learned."""
    folder = tmp_path_factory.mktemp("train")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # its law is far from flat: there is something to learn
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    pattern = torch.randint(VOCAB, (12,))
    starts = torch.randint(12, (40,)).tolist()
    data.save_tokens(folder / "d.safetensors", [pattern.repeat(4)[s : s + 24] for s in starts])
    return folder


@pytest.fixture
def options(folder, tmp_path):
    def make(**changes):
        return parse(
            **{
                "target": folder / "target",
                "data": folder / "d.safetensors",
                "out": tmp_path / "out",
                "draft_vocab_size": 20,
                "steps": 6,
                "batch": 4,
                "length": 24,
                "lr": 1e-3,
                "rank_from": 2,
                "save_every": 3,
                "log_every": 2,
                **changes,
            }
        )

    return make


def weights(out):
    return torch.load(out / "training" / "state.pt", weights_only=True)["drafter"]


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
    run = Trainer(options())
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
            patch.setattr(loop.checkpoint, "save", write_half)
        run.save()
    assert (options().out / "training" / "state.pt").read_bytes() == before[
        options().out / "training" / "state.pt"
    ]
    again = Trainer(options())
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
    data.save_tokens(tmp_path / "other.safetensors", [torch.arange(24)])
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
    run = Trainer(options())
    before = run.drafter.rank_head[0].weight.detach().clone()
    run.update()
    run.update()
    assert torch.equal(run.drafter.rank_head[0].weight, before)
    run.update()
    assert not torch.equal(run.drafter.rank_head[0].weight, before)


def test_the_result_loads_and_is_bf16(options):
    out = train(options(), progress=False)
    drafter = checkpoint.load(out, torch.float32)
    for name, value in weights(out).items():
        assert torch.equal(drafter.state_dict()[name].float(), value.bfloat16().float()), name
    frequent = data.load(options().data, None, VOCAB, 24, 6).counts(VOCAB).topk(8).indices
    assert drafter.t2d[frequent].all()
    assert drafter.config.target.layer_ids == (2, 3, 4)


def test_a_fresh_head_is_the_targets_with_its_norm_folded_in(options):
    run = Trainer(options())
    with torch.no_grad():
        run.target.model.norm.weight.uniform_(0.5, 2.0)
    drafter = run._drafter()
    state = torch.randn(3, 32)
    wanted = run.target.lm_head(state * run.target.model.norm.weight)[:, run.draft_ids]
    torch.testing.assert_close(drafter.lm_head(state), wanted)


def test_training_goes_on_from_a_drafter(options, tmp_path):
    first = train(options(steps=1, out=tmp_path / "first"), progress=False)
    run = Trainer(options(init=first, draft_vocab_size=5))
    started = checkpoint.load(first)
    assert all(
        torch.equal(run.drafter.state_dict()[name], value)
        for name, value in started.state_dict().items()
    )


def test_bf16_keeps_float32_masters(options):
    run = Trainer(options(precision="bf16"))
    run.update()
    assert {p.dtype for p in run.drafter.parameters()} == {torch.float32}
    assert run.target.dtype == torch.bfloat16


def test_the_frozen_target_stays(options):
    run = Trainer(options())
    before = [p.clone() for p in run.target.parameters()]
    run.update()
    assert all(torch.equal(a, b) for a, b in zip(before, run.target.parameters()))


@torch.no_grad()
def test_the_teaching_is_what_the_target_says(options):
    run = Trainer(options())
    tokens = run.windows.tokens[:2].clone()
    tokens[1, 20:] = -1
    teaching = teach(run.target, tokens, (2, 3, 4), run.draft_ids)
    output = run.target(input_ids=tokens[1:, :20], output_hidden_states=True)
    states = torch.cat([output.hidden_states[layer][0] for layer in (2, 3, 4)], dim=-1)
    torch.testing.assert_close(teaching.hidden[1, :20], states)
    law = output.logits[0].softmax(-1)[:, run.draft_ids]
    torch.testing.assert_close(teaching.law[1, :20], law / law.sum(-1, keepdim=True))


def test_schedule(options):
    config = options(steps=1000, lr=1.0)
    rates = [learning_rate(config, step) for step in range(1000)]
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
            (["--precision", "int8"], "Option precision"),
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
