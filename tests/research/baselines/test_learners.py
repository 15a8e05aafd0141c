"""Learners of whole batches against plain arithmetic of one row at a time, kind by kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from baselines.eagle3 import Eagle3
from baselines.falcon import Falcon
from baselines.mask_blocks import DFlash, JetSpec
from baselines.medusa import Medusa
from baselines.parallelspec import ParallelSpec
from baselines.sps import SmallModel
from support.baseline_batches import (
    DRAFT_VOCAB,
    HIDDEN,
    SMALL,
    TARGET_CONFIG,
    VOCAB,
    assert_outcome,
    embed,
    lesson_of,
    packed_lesson,
    plain_trunk,
    script_to,
    vocabulary,
)
from support.dflash import plain_states
from support.eagle3 import PlainEagle3
from support.trees import texts
from transformers import AutoModelForCausalLM

from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import EvalSequence

FORWARDS, MASK = 3, 19
HEAD = torch.randn(DRAFT_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
Where = tuple[int, int, int]
"""(window, first column of the row's document, column)"""


def medusa_rows(drafter, train_batch, where: Where, fed) -> list[torch.Tensor]:
    """Each head after one state."""
    window, _, column = where
    out = []
    for block in drafter.blocks:
        x = train_batch.target_outputs.last[window, column]
        for layer in block.layers:
            z = layer.weight @ x
            x = x + z / (1 + torch.exp(-z))
        out.append((drafter.lm_head.weight @ x).log_softmax(-1))
    return out


def eagle3_rows(drafter, train_batch, where: Where, fed: list[int]) -> list[torch.Tensor]:
    """Each state from the whole path before it."""
    window, begin, column = where
    hidden = train_batch.target_outputs.hidden[window, begin:]
    text = train_batch.batch.tokens[window, begin:]
    plain = PlainEagle3(drafter, embed, hidden, text, column - begin + 1)
    states = (plain.state(fed[:step]) for step in range(drafter.steps))
    return [drafter.logits(state).log_softmax(-1) for state in states]


def fused(trunk, condition, tokens) -> torch.Tensor:
    """What a trunk's layers read of projected conditions and tokens."""
    both = [trunk.condition_norm(condition), trunk.token_norm(embed(tokens))]
    return torch.cat(both, -1) @ trunk.fuse.weight.T


def fused_text(trunk, train_batch, where: Where) -> torch.Tensor:
    """The same of a document's rows up to a column."""
    window, begin, column = where
    condition = train_batch.target_outputs.hidden[window, begin : column + 1]
    tokens = train_batch.batch.tokens[window, begin + 1 : column + 2]
    return fused(trunk, condition @ trunk.condition_proj.weight.T, tokens)


def parallelspec_rows(drafter, train_batch, where: Where, fed) -> list[torch.Tensor]:
    """The document up to the row, then the mask tokens."""
    trunk = drafter.trunk
    inputs = torch.cat([fused_text(trunk, train_batch, where), drafter.mask_tokens])
    count = len(inputs)
    causal = torch.ones(count, count).tril().bool()
    states = plain_trunk(trunk, inputs, torch.arange(1, count + 1), causal)
    states = states[-1 - len(drafter.mask_tokens) :]
    return list((drafter.norm(states) @ drafter.lm_head.weight.T).log_softmax(-1))


def falcon_rows(drafter, train_batch, where: Where, fed: list[int]) -> list[torch.Tensor]:
    """The blocks up to the row, then one block after another of its own states and of `fed`, the
    tokens after the root."""
    k, trunk = drafter.config.block_size, drafter.trunk
    real = fused_text(trunk, train_batch, where)
    missing = -len(real) % k
    blocks = list(torch.cat([torch.zeros(missing, HIDDEN), real]).split(k))
    positions = []
    while True:
        inputs = torch.cat([block + drafter.lstm(block[None])[0][0] for block in blocks])
        number = torch.arange(len(inputs)) // k
        place = torch.arange(len(inputs)) + 1 - missing
        states = plain_trunk(trunk, inputs, place, number[:, None] >= number)[-k:]
        positions += list((drafter.norm(states) @ drafter.lm_head.weight.T).log_softmax(-1))
        done = len(positions)
        if done == k * drafter.config.forwards or len(fed) < done:
            return positions
        blocks.append(fused(trunk, states, torch.tensor(fed[done - k : done])))


def mask_rows(drafter, train_batch, where: Where, fed) -> list[torch.Tensor]:
    """The masks behind the root."""
    window, begin, column = where
    features = train_batch.target_outputs.hidden[window, begin : column + 1]
    root = int(train_batch.batch.tokens[window, column + 1])
    block = embed(torch.tensor([root, *[MASK] * 3]))
    return list(drafter.lm_head(plain_states(drafter, features, block))[1:].log_softmax(-1))


@dataclass(frozen=True)
class Kind:
    """A learner's class, its sizes, its rows in plain arithmetic and the weights of positions."""

    make: type
    sizes: dict
    rows: Callable
    weights: list[float]
    blocks: int = 1
    head: torch.Tensor | None = None

    def learner(self, **changes):
        d2t, t2d, _ = vocabulary()
        return self.make.for_target(TARGET_CONFIG, d2t, t2d, 0, self.head, **self.sizes | changes)


MASKS = {"masks": 3, "mask_token_id": MASK, "budget": 15}
FALLING = [0.8, 0.64, 0.512, 0.4096]
LONG = {"forwards": FORWARDS, "lstm_layers": 2, "budget": 25}
FOUR = {"block_size": 4, "budget": 15}
KINDS = {
    "medusa": Kind(Medusa, {"num_heads": 4, "num_layers": 2, "budget": 15}, medusa_rows, FALLING),
    "eagle3": Kind(Eagle3, {}, eagle3_rows, [0.8**step for step in range(7)]),
    "parallelspec": Kind(ParallelSpec, FOUR, parallelspec_rows, [1.0] * 4),
    **{
        f"falcon, {k}": Kind(
            Falcon, LONG | {"block_size": k}, falcon_rows, [1.0] * k * FORWARDS, FORWARDS
        )
        for k in (2, 4)
    },
    "dflash": Kind(DFlash, MASKS, mask_rows, [1.0, 0.60653, 0.36788], head=HEAD),
    "jetspec": Kind(JetSpec, MASKS, mask_rows, [1.0] * 3, head=HEAD),
}


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def drafter(kind):
    made = kind.learner()
    if kind.make is Medusa:  # whose heads begin as the target's own
        for block in made.blocks:
            for layer in block.layers:
                torch.nn.init.normal_(layer.weight, std=0.3)
    return made


@pytest.fixture
def train_batch():
    return packed_lesson()


@torch.no_grad()
def test_loss_is_that_of_every_row_alone(kind, drafter, train_batch):
    def rows(window, begin, column):
        # The tokens after a root. Past the document's end any do: nothing there is counted.
        text = [*train_batch.batch.tokens[window].clamp(min=0).tolist(), *[0] * 9]
        return kind.rows(drafter, train_batch, (window, begin, column), text[column + 2 :])

    assert_outcome(drafter(train_batch), rows, train_batch, kind.weights, kind.blocks)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in KINDS if name != "eagle3"])
def test_drafts_what_it_was_trained_to(name, train_batch):
    """Trees score their paths as rows do; one pass over the whole text drafts the same."""
    kind, named = KINDS[name], vocabulary()[2]
    drafter = kind.learner()
    if kind.make is Falcon:  # two long paths that part at once
        drafter.hits[:] = torch.tensor([0.99, 0.2] + [0.01] * 8)
        drafter.hits[0, :2] = 0.5
    whole = drafter.draft_along(script_to(train_batch, 8))
    for root in (1, 5, 8):
        found = texts(drafter.draft_along(script_to(train_batch, root))(root), 0)
        assert len(found) == kind.sizes["budget"]
        if kind.make is Falcon:
            long = {path[0] for path in found if len(path) > 2 * drafter.config.block_size}
            assert len(long) == 2
        for path, score in found.items():
            positions = kind.rows(drafter, train_batch, (0, 0, root - 1), list(path))
            total = sum(positions[k][named.index(token)].item() for k, token in enumerate(path))
            assert score == pytest.approx(total, abs=1e-4)
        close = 1e-5 if kind.make is Falcon else 1e-4
        assert texts(whole(root), 0) == pytest.approx(found, abs=close)


def test_every_weight_learns(drafter, train_batch):
    drafter(train_batch).loss.backward()
    assert all(weight.grad.abs().sum() > 0 for weight in drafter.parameters())


def test_medusa_starts_as_the_target_and_takes_short_windows():
    d2t, t2d, _ = vocabulary()
    medusa = Medusa.for_target(TARGET_CONFIG, d2t, t2d, 0, HEAD, num_heads=3)
    last = torch.randn(HIDDEN)
    for logits in medusa.logits(medusa.states(last)):
        assert torch.allclose(logits, HEAD @ last, atol=1e-5)
    outcome = medusa(lesson_of(Batch.of(torch.tensor([[4, 5, 6]]))))
    assert outcome.loss.isfinite() and outcome.seen[0, 1:].sum() == 0


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
