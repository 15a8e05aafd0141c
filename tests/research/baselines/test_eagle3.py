"""EAGLE-3 against a loop over rows in plain arithmetic: states, losses, files."""

from __future__ import annotations

import json
import math

import pytest
import torch
from baselines.eagle3 import DECAY, Eagle3
from safetensors.torch import load_file
from support.baseline_batches import two_windows
from transformers import LlamaConfig
from vllm_specblock.triton_kernels.drafting.grow_level import LevelLimits

from vllm_specblock.drafters.eagle3.checkpoint import FILES
from vllm_specblock.train.learner import EvalSequence, TrainBatch
from vllm_specblock.train.target.features import TargetOutputs

HIDDEN, VOCAB, STEPS = 16, 20, 4
NAMED = torch.tensor([1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15, 16, 18, 19])
TARGET = LlamaConfig(
    hidden_size=HIDDEN,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=24,
    num_hidden_layers=9,
    vocab_size=VOCAB,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    max_position_embeddings=64,
)


def make(seed: int = 1, **changes) -> Eagle3:
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[NAMED] = True
    learner = Eagle3.for_target(
        TARGET, NAMED - torch.arange(len(NAMED)), t2d, seed, steps=STEPS, **changes
    )
    with torch.no_grad():
        for name, weight in learner.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return learner


class Plain:
    """The drafter one row at a time, in float64, with nothing of the module but its weights."""

    def __init__(self, learner: Eagle3):
        self.weight = {name: w.detach().double() for name, w in learner.named_parameters()}

    def norm(self, x, name):
        return x / math.sqrt(float((x * x).mean()) + 1e-5) * self.weight[name + ".weight"]

    def turned(self, x, position):
        """RoPE of every head, pair by pair."""
        out = x.clone()
        for head in range(len(x)):
            for i in range(2):
                angle = position * 100.0 ** (-2 * i / 4)
                a, b = float(x[head, i]), float(x[head, i + 2])
                out[head, i] = a * math.cos(angle) - b * math.sin(angle)
                out[head, i + 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def fuse(self, hidden):
        return self.weight["fc.weight"] @ hidden.double()

    def row(self, embedding, feature, position, seen):
        """(state, seen and this row's own key and value)."""
        w, at = self.weight, "midlayer.self_attn."
        normed = torch.cat(
            [
                self.norm(embedding.double(), "midlayer.input_layernorm"),
                self.norm(feature, "midlayer.hidden_norm"),
            ]
        )
        query = self.turned((w[at + "q_proj.weight"] @ normed).view(4, 4), position)
        key = self.turned((w[at + "k_proj.weight"] @ normed).view(2, 4), position)
        seen = [*seen, (key, (w[at + "v_proj.weight"] @ normed).view(2, 4))]
        mixed = []
        for head in range(4):
            score = [float(query[head] @ k[head // 2]) / 2 for k, _ in seen]
            total = sum(math.exp(each) for each in score)
            mixed.append(sum(math.exp(e) / total * v[head // 2] for e, (_, v) in zip(score, seen)))
        hidden = feature + w[at + "o_proj.weight"] @ torch.cat(mixed)
        normed = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate = w["midlayer.mlp.gate_proj.weight"] @ normed
        inner = gate * gate.sigmoid() * (w["midlayer.mlp.up_proj.weight"] @ normed)
        return hidden + w["midlayer.mlp.down_proj.weight"] @ inner, seen

    def logprob(self, state) -> list[float]:
        logits = self.weight["lm_head.weight"] @ self.norm(state, "norm")
        return logits.log_softmax(-1).tolist()

    def path(self, embed, tokens, hidden, row: int, further: list[int]):
        """States of the chain that is drafted at `row` and fed `further` tokens."""
        seen = []
        for i in range(row + 1):
            state, seen = self.row(embed(tokens[i + 1]), self.fuse(hidden[i]), i, seen)
        states = [state]
        for step, token in enumerate(further, start=1):
            state, seen = self.row(embed(torch.tensor(token)), state, row + step, seen)
            states.append(state)
        return states


@pytest.fixture
def embed():
    torch.manual_seed(0)
    table = torch.randn(VOCAB, HIDDEN)
    return lambda tokens: table[tokens]


@pytest.fixture
def train_batch(embed):
    batch = two_windows(VOCAB)
    target_probs = torch.randn(2, 12, len(NAMED)).softmax(-1)
    target_outputs = TargetOutputs(
        torch.randn(2, 12, 3 * HIDDEN), torch.randn(2, 12, HIDDEN), target_probs
    )
    return TrainBatch(batch, target_outputs, embed, 0, 0)


DOCUMENTS = [(0, 0, 7), (0, 7, 4), (1, 0, 12)]  # window, first column, length


def test_loss_and_tally_are_the_loop_over_rows(train_batch):
    learner = make(seed=0)
    with torch.no_grad():
        # Two likely tokens, so that chains of every length occur.
        learner.lm_head.weight[[3, 9]] *= 5
    tokens, named = train_batch.batch.tokens, NAMED.tolist()
    draw = torch.Generator().manual_seed(12)
    tokens.copy_(
        torch.where(torch.rand(2, 12, generator=draw) < 0.9, NAMED[[3, 9]][tokens % 2], tokens)
    )
    tokens[0, 11] = -1
    plain = Plain(learner)
    losses = [[] for _ in range(STEPS)]
    ce_loss, hits, seen = ([0.0] * STEPS for _ in range(3))
    for window, first, length in DOCUMENTS:
        text = tokens[window, first : first + length]
        hidden = train_batch.target_outputs.hidden[window, first : first + length]
        for row in range(length - 2):
            further = text[row + 2 : row + 1 + STEPS].tolist()
            alive = True
            for step, state in enumerate(plain.path(train_batch.embed, text, hidden, row, further)):
                place = row + 2 + step
                known = place < length and train_batch.batch.loss_mask[window, first + place]
                if not known or text[place].item() not in named:
                    alive = False
                    continue
                logprob = plain.logprob(state)
                target_probs = train_batch.target_outputs.target_probs[
                    window, first + place - 1
                ].tolist()
                loss = -sum(p * q for p, q in zip(target_probs, logprob))
                losses[step].append(loss)
                if alive:
                    ce_loss[step] += loss
                    seen[step] += 1
                    alive = logprob.index(max(logprob)) == named.index(text[place].item())
                    hits[step] += alive
    assert hits[0] > 3 and hits[1] > 0 and len(losses[-1]) > seen[-1] > 0
    outcome = learner(train_batch)
    expected = sum(DECAY**step * sum(each) / len(each) for step, each in enumerate(losses))
    assert outcome.loss.item() == pytest.approx(expected, rel=1e-5)
    assert outcome.ce_loss[0].tolist() == pytest.approx(ce_loss, rel=1e-4)
    assert outcome.hits.tolist() == [hits]
    assert outcome.seen.tolist() == [seen]
    outcome.loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in learner.parameters())


def test_training_drafts_as_serving_does(train_batch):
    """The states of the unrolled steps are those of a chain whose tokens are the text's."""
    learner = make(growth=LevelLimits(STEPS, 1, 1, STEPS))
    states: list[torch.Tensor] = []  # what the layer gives, forward by forward
    learner.midlayer.register_forward_hook(lambda _, __, output: states.append(output.detach()))
    learner(train_batch)
    trained = torch.stack(states)[:, 1]  # [J, L, H]
    tokens, hidden = train_batch.batch.tokens[1], train_batch.target_outputs.hidden[1]
    sequence = EvalSequence(
        tokens, 2, hidden, train_batch.target_outputs.last[1], train_batch.embed
    )
    draft = learner.draft_along(sequence)
    for root in (2, 3, 7):
        told = iter(tokens[root + 1 :])
        learner.best = lambda state, width, sharpness: (
            torch.zeros(*state.shape[:-1], 1),
            next(told).expand(*state.shape[:-1], 1),  # noqa: B023
        )
        states.clear()
        tree = draft(root)
        assert tree.token[0].tolist() == tokens[root + 1 : root + 1 + STEPS].tolist()
        assert len(states) == STEPS  # drafter forwards
        drafted = torch.stack([state[-1] for state in states])
        torch.testing.assert_close(drafted, trained[:, root - 1], atol=1e-5, rtol=1e-4)


def test_files_are_named_as_vllm_reads_them(tmp_path):
    learner = make()
    learner.save(tmp_path / "out")
    learner.save(tmp_path / "out")  # what is there is replaced
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(torch.arange(14) + tensors["d2t"], NAMED)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["draft_vocab_size"] == 14 and config["rope_parameters"]["rope_theta"] == 100.0
    loaded = FILES.load(tmp_path / "out")
    assert loaded.config == learner.config
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, learner.state_dict()[name].bfloat16().to(weight.dtype)), name


def test_a_drafter_that_names_every_token_is_saved_without_a_mapping(tmp_path):
    everything = torch.ones(VOCAB, dtype=torch.bool)
    Eagle3.for_target(TARGET, torch.zeros(VOCAB, dtype=torch.int64), everything, 0).save(tmp_path)
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    assert FILES.load(tmp_path).d2t.tolist() == [0] * VOCAB
