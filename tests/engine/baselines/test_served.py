"""Drafters of a network and of a whole model in vLLM; `tests/research` has all without vLLM."""

from __future__ import annotations

import pytest
import torch
from baselines.falcon import Falcon
from baselines.sps import SmallModel
from support.engines import DRAFTER, TARGET, assert_identical, make_engine
from support.matrix import PROMPTS, params

from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.target.features import OnlineTeacher, load_target
from vllm_specblock.train.untrained import most_frequent

ASKED, NEW_TOKENS, DRAFT_VOCAB = PROMPTS[:4], 40, 600
LAYERS = (2, 3, 4)
MAKE = {
    "falcon": (Falcon, {"layer_ids": LAYERS, "num_hidden_layers": 1}),
    "sps": (
        SmallModel,
        {
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
        },
    ),
}
SECOND = {
    "falcon": {"second_drafter": {"model": str(DRAFTER)}, "draft_policy": "merge"},
    "sps": {"second_drafter": {"model": str(DRAFTER)}, "draft_policy": "route"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, reference):
    """Every kind, after a moment of learning what vLLM goes on with after the test's prompts."""
    torch.manual_seed(0)
    answers = reference("baselines", params(len(ASKED), max_tokens=NEW_TOKENS), ASKED)
    texts = [torch.tensor([*ask[-24:], *one.tokens]) for ask, (one,) in zip(ASKED, answers)]
    batch = Batch.of(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1))
    target = load_target(TARGET, "fp32", torch.device("cpu"))
    counts = batch.tokens[batch.tokens >= 0].bincount(minlength=target.config.vocab_size)
    d2t, t2d = most_frequent(counts, DRAFT_VOCAB)
    named = t2d.nonzero()[:, 0]
    head = target.get_output_embeddings().weight[named]
    teacher = OnlineTeacher(target, LAYERS, named)
    train_batch = TrainBatch(batch, teacher.teach(batch), teacher.embed, 0, 0)
    found = {}
    for kind, (make, sizes) in MAKE.items():
        learner = make.for_target(target.config, d2t, t2d, 0, head, **sizes)
        optimizer = torch.optim.Adam(learner.parameters(), 3e-3)
        for _ in range(25):
            optimizer.zero_grad()
            learner(train_batch).loss.backward()
            optimizer.step()
        found[kind] = tmp_path_factory.mktemp(kind)
        learner.save(found[kind])
    return found


@pytest.mark.parametrize("kind", MAKE)
def test_tokens_are_vllms_own_and_drafts_are_accepted(kind, folders, reference, monkeypatch):
    engine = make_engine(
        {"model": str(folders[kind]), "num_speculative_tokens": 12, **SECOND.get(kind, {})}
    )
    for pad in (False, True):  # as on a GPU
        monkeypatch.setattr(engine.speculator, "pad_rows", pad)
        for name, how in (("baselines", {}), ("baselines, hot", {"temperature": 1.0})):
            requests = params(len(ASKED), max_tokens=NEW_TOKENS, **how)
            found = engine.generate(ASKED, requests)
            assert_identical(found, reference(name, requests, ASKED))
    count = engine.speculator.counters.as_dict()
    # Where it is routed, the trained head is surer and drafts most steps.
    steps = count["chosen_trees_1"] if "route" in str(SECOND.get(kind)) else 160
    assert count["accepted_nodes_1"] > steps / 4, count
