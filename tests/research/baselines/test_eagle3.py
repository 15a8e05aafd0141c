"""EAGLE-3's loss against a loop over rows, and its files."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from baselines.eagle3 import DECAY, Eagle3
from safetensors.torch import load_file
from support.baseline_batches import two_windows
from support.eagle3 import PlainEagle3
from transformers import LlamaConfig

from vllm_specblock.drafters.eagle3.model import FILES
from vllm_specblock.train.learner import TrainBatch
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
    learner = Eagle3.for_target(TARGET, NAMED - torch.arange(len(NAMED)), t2d, seed, **changes)
    learner.steps = STEPS
    with torch.no_grad():
        for name, weight in learner.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return learner


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
    exact = copy.deepcopy(learner).double()
    losses = [[] for _ in range(STEPS)]
    ce_loss, hits, seen = ([0.0] * STEPS for _ in range(3))
    for window, first, length in DOCUMENTS:
        text = tokens[window, first : first + length]
        hidden = train_batch.target_outputs.hidden[window, first : first + length]
        for row in range(length - 2):
            further = text[row + 2 : row + 1 + STEPS].tolist()
            alive = True
            plain = PlainEagle3(exact, train_batch.embed, hidden, text, row + 1)
            for step in range(len(further) + 1):
                place = row + 2 + step
                known = place < length and train_batch.batch.loss_mask[window, first + place]
                if not known or text[place].item() not in named:
                    alive = False
                    continue
                logprob = exact.logits(plain.state(further[:step])).log_softmax(-1).tolist()
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
