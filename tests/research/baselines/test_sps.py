"""The small model of speculative sampling against one document, one token at a time."""

from __future__ import annotations

import pytest
import torch
from baselines.sps import SmallModel
from drafter_zoo import parameters
from support.baseline_batches import SMALL, two_windows
from transformers import AutoModelForCausalLM, LlamaConfig

from vllm_specblock.train.learner import EvalSequence, TrainBatch
from vllm_specblock.train.target.features import TargetOutputs

VOCAB = 20
NAMED = torch.tensor([1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15, 16, 18, 19])
TARGET = LlamaConfig(
    vocab_size=VOCAB,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)


@pytest.fixture
def learner() -> SmallModel:
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[NAMED] = True
    learner = SmallModel.for_target(TARGET, t2d, 3, **SMALL)
    learner.depth = 4
    with torch.no_grad():
        learner.llama.model.embed_tokens.weight.mul_(30)  # apart from each other
    return learner


def refuse(tokens):
    raise AssertionError("it has an embedding of its own")


@torch.no_grad()
def next_logprob(learner: SmallModel, tokens: list[int]) -> torch.Tensor:
    """[Vd] after `tokens`, by one forward over them."""
    logits = learner.llama(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits[NAMED].log_softmax(-1)


def test_loss_is_that_of_documents_apart(learner):
    batch = two_windows(VOCAB)
    tokens, loss_mask = batch.tokens, batch.loss_mask
    # Half of the documents say what the drafter would.
    for column in range(1, 12):
        if column % 2:
            best = next_logprob(learner, tokens[1, :column].tolist()).argmax()
            tokens[1, column] = NAMED[best]
    target_probs = torch.randn(2, 12, len(NAMED)).softmax(-1)
    target_outputs = TargetOutputs(torch.zeros(2, 12, 3), torch.zeros(2, 12, 1), target_probs)
    train_batch = TrainBatch(batch, target_outputs, refuse, 0, 0)

    losses, hits = [], 0
    for window, first, length in [(0, 0, 7), (0, 7, 4), (1, 0, 12)]:
        text = tokens[window, first : first + length].tolist()
        for place in range(1, length):
            if loss_mask[window, first + place] and text[place] in NAMED:
                logprob = next_logprob(learner, text[:place])
                losses.append(-(target_probs[window, first + place - 1] * logprob).sum().item())
                hits += int(NAMED[logprob.argmax()]) == text[place]
    outcome = learner(train_batch)
    assert 3 < hits < len(losses) < 19
    assert outcome.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert outcome.ce_loss.tolist() == [[pytest.approx(sum(losses), rel=1e-5)]]
    assert outcome.hits.tolist() == [[hits]]
    assert outcome.seen.tolist() == [[len(losses)]]
    outcome.loss.backward()
    assert all(weight.grad is not None for weight in learner.parameters())


def test_chains_are_greedy_without_a_cache(learner):
    torch.manual_seed(5)
    tokens = torch.randint(VOCAB, (14,))
    nothing = torch.full((14, 1), float("nan"))
    draft = learner.draft_along(EvalSequence(tokens, 3, nothing, nothing, refuse))
    for root in (3, 4, 9, 10):
        text, score, chain, scores = tokens[: root + 1].tolist(), 0.0, [], []
        for _ in range(4):
            best = next_logprob(learner, text + chain).max(-1)
            score += best.values.item()
            chain.append(int(NAMED[best.indices]))
            scores.append(score)
        tree = draft(root)
        assert tree.token[0].tolist() == chain
        assert tree.logprob[0].tolist() == pytest.approx(scores, abs=1e-4)
        assert tree.parent[0].tolist() == [0, 1, 2, 3]


def test_vllm_gets_a_llama(learner, tmp_path):
    before = torch.get_rng_state()
    again = SmallModel.for_target(TARGET, learner.t2d, 3, **SMALL)
    assert torch.equal(before, torch.get_rng_state())
    assert parameters(again) == parameters(learner)
    weight = learner.llama.model.layers[1].mlp.up_proj.weight
    assert torch.equal(again.llama.model.layers[1].mlp.up_proj.weight, weight)
    learner.save(tmp_path / "out")
    learner.save(tmp_path / "out")  # what is there is replaced
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and loaded.config.tie_word_embeddings
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert loaded.config.rope_parameters["rope_theta"] == 100.0
    for name, stored in loaded.named_parameters():
        assert torch.equal(stored, learner.llama.get_parameter(name).bfloat16()), name
    assert weight.dtype == torch.float32
