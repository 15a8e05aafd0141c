"""Other papers' drafters in vLLM: the tokens are its own, and what learners saved is drafted."""

from __future__ import annotations

import pytest
import torch
from baselines.falcon import Falcon
from baselines.medusa import Medusa
from baselines.parallelspec import ParallelSpec
from baselines.sps import SmallModel
from support.engines import DRAFTER, TARGET, assert_identical, configure, make_engine, record_drafts
from support.matrix import PROMPTS, params
from transformers import AutoConfig
from vllm import SamplingParams

from vllm_specblock.engine.config import vllm_args
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.learner import TrainBatch
from vllm_specblock.train.target.features import OnlineTeacher, load_target
from vllm_specblock.train.untrained import most_frequent

ASKED, NEW_TOKENS, DRAFT_VOCAB = PROMPTS[:4], 40, 600
LAYERS = (2, 3, 4)
MAKE = {
    "medusa": (Medusa, {"num_heads": 4}),
    "parallelspec": (ParallelSpec, {"positions": 4, "layer_ids": LAYERS, "num_hidden_layers": 1}),
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


@pytest.mark.parametrize("kind", ["medusa", "sps"])
def test_the_last_cached_block_is_kept(kind, folders, monkeypatch):
    """The cache rows of neither depend on the next token."""
    engine = make_engine(
        {"model": str(folders[kind]), "num_speculative_tokens": 12, "calibrate_drafts": False}
    )
    drafts = record_drafts(engine, monkeypatch)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    text, found = PROMPTS[5], []
    assert len(text) == 120
    # The second run follows a text that differs after three full blocks.
    for before in ([], [*text[:96], *text[:9]]):
        engine.llm.reset_prefix_cache()
        if before:
            engine.generate([before], greedy)
        drafts.clear()
        (answer,) = engine.llm.generate([{"prompt_token_ids": text}], greedy, use_tqdm=False)
        found.append((answer.num_cached_tokens, answer.outputs[0].token_ids, list(drafts)))
    assert [cached for cached, *_ in found] == [0, 96]
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize(
    ("kind", "inner", "read"),
    [("medusa", [], (7,)), ("falcon", [2, 3, 4], (2, 3, 4)), ("sps", [], ())],
)
def test_states_that_vllm_is_asked_for(kind, inner, read, tmp_path):
    """What the LM head reads comes without asking: it is no inner layer's."""
    make, sizes = MAKE[kind]
    target = AutoConfig.from_pretrained(TARGET)
    t2d = torch.ones(target.vocab_size, dtype=torch.bool)
    make.for_target(target, torch.zeros(target.vocab_size).long(), t2d, 0, **sizes).save(tmp_path)
    config = configure({"model": str(tmp_path)})
    draft = config.speculative_config.draft_model_config.hf_config
    assert draft.eagle_aux_hidden_state_layer_ids == inner
    assert vllm_args.read_back(config.additional_config).layers == read
