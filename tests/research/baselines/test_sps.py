"""The small model of speculative sampling against one document, one token at a time."""

from __future__ import annotations

import pytest
import torch
from baselines.sps import SmallModel
from support.baseline_batches import SMALL, TARGET_CONFIG, VOCAB, packed_lesson, vocabulary
from transformers import AutoModelForCausalLM

from vllm_specblock.train.learner import EvalSequence

_, T2D, NAMED = vocabulary()


@pytest.fixture
def learner() -> SmallModel:
    learner = SmallModel.for_target(TARGET_CONFIG, T2D, 3, **SMALL)
    learner.depth = 4
    with torch.no_grad():
        learner.llama.model.embed_tokens.weight.mul_(30)  # apart from each other
    return learner


@torch.no_grad()
def next_logprob(learner: SmallModel, tokens: list[int]) -> torch.Tensor:
    """[Vd] after `tokens`, by one forward over them."""
    logits = learner.llama(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits[NAMED].log_softmax(-1)


def test_loss_is_that_of_documents_apart(learner):
    train_batch = packed_lesson()
    batch, target_probs = train_batch.batch, train_batch.target_outputs.target_probs
    for column in range(1, 15, 2):  # half of a document says what the drafter would
        best = next_logprob(learner, batch.tokens[2, :column].tolist()).argmax()
        batch.tokens[2, column] = NAMED[best]
    losses, hits = [], 0
    for window, column in (batch.position > 0).nonzero().tolist():
        text = batch.tokens[window, : column + 1].tolist()
        if batch.loss_mask[window, column] and text[column] in NAMED:
            logprob = next_logprob(learner, text[column - batch.position[window, column] : column])
            losses.append(-(target_probs[window, column - 1] * logprob).sum().item())
            hits += NAMED[logprob.argmax()] == text[column]
    outcome = learner(train_batch)
    assert 3 < hits < len(losses)
    assert outcome.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert outcome.ce_loss.tolist() == [[pytest.approx(sum(losses), rel=1e-5)]]
    assert outcome.hits.tolist() == [[hits]]
    assert outcome.seen.tolist() == [[len(losses)]]
    outcome.loss.backward()
    assert all(weight.grad is not None for weight in learner.parameters())


def test_chains_are_greedy_without_a_cache(learner):
    torch.manual_seed(5)
    tokens, nothing = torch.randint(VOCAB, (14,)), torch.full((14, 1), float("nan"))
    draft = learner.draft_along(EvalSequence(tokens, 3, nothing, nothing, None))
    for root in (3, 4, 9, 10):
        text, score, chain, scores = tokens[: root + 1].tolist(), 0.0, [], []
        for _ in range(4):
            best = next_logprob(learner, text + chain).max(-1)
            score += best.values.item()
            chain.append(NAMED[best.indices])
            scores.append(score)
        tree = draft(root)
        assert tree.token[0].tolist() == chain
        assert tree.logprob[0].tolist() == pytest.approx(scores, abs=1e-4)
        assert tree.parent[0].tolist() == [0, 1, 2, 3]


def test_vllm_gets_a_llama(learner, tmp_path):
    before = torch.get_rng_state()
    again = SmallModel.for_target(TARGET_CONFIG, T2D, 3, **SMALL)
    assert torch.equal(before, torch.get_rng_state())
    weight = learner.llama.model.layers[1].mlp.up_proj.weight
    assert torch.equal(again.llama.model.layers[1].mlp.up_proj.weight, weight)
    learner.save(tmp_path / "out")
    learner.save(tmp_path / "out")  # what is there is replaced
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and loaded.config.tie_word_embeddings
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    for name, stored in loaded.named_parameters():
        assert torch.equal(stored, learner.llama.get_parameter(name).bfloat16()), name
    assert weight.dtype == torch.float32
