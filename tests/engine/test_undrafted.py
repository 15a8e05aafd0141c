"""Requests without drafts, or with chains: exact, and without effect on other requests."""

from __future__ import annotations

import pytest
from support.drafters import install
from support.engines import Engine, asynchronous_engine, note_calls, record_drafts, shared_engine
from support.matrix import PROMPTS, Checker, half_sampled, no_pause, params
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_specblock.engine.request_drafts import looks_back

check = Checker()

NO = {"specblock_draft": 0}


@pytest.fixture
def asynchronous() -> Engine:
    return asynchronous_engine()


@pytest.fixture(params=["tree", "budgeted"])
def engine(request, monkeypatch) -> Engine:
    engine = request.getfixturevalue(request.param)
    if engine.runner.adaptive_verification is not None:  # a busy machine would pause drafting
        no_pause(engine, monkeypatch)
    return engine


def opting_out(requests: list[SamplingParams], every: int = 1) -> list[SamplingParams]:
    """Let every n-th request decline drafts."""
    for request in requests[::every]:
        request.extra_args = NO
    return requests


@pytest.mark.parametrize("engine", ["tree", "budgeted", "asynchronous"], indirect=True)
@pytest.mark.parametrize("every", [1, 3])
def test_requests_opt_out(engine, reference, monkeypatch, every):
    """Asynchronously, the scheduler gives placeholders only to requests with drafts."""
    (drafter,) = engine.speculator.draft_policy.drafters
    trees = note_calls(monkeypatch, drafter, "draft", lambda *_: "a tree")
    requests = half_sampled()
    for request in requests[2::4]:
        request.repetition_penalty = 1.3
    expected = reference("half sampled, some penalised", requests)
    found = check(engine, opting_out(requests, every), expected)
    counts = [answer.drafted for (answer,) in found]
    assert not any(counts[::every])
    if every == 1:
        assert not trees
    else:
        assert all(count for at, count in enumerate(counts) if at % every)


def test_logprobs_of_chosen_tokens_take_no_drafts(tree, plain):
    """vLLM's rejection sampler would leave them out."""
    wanted = [5, 300]
    (request,) = params(1, max_tokens=8, logprobs=2)
    request.logprob_token_ids = wanted
    rows = []
    for each in (tree, plain):
        ((answer,),) = each.generate(PROMPTS[:1], request)
        rows.append([{token: row[token][0] for token in wanted} for row in answer.logprobs])
    assert len(rows[0]) == 8
    for ours, theirs in zip(*rows, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4)


@pytest.mark.parametrize("extra", [None, NO])
def test_a_prompt_of_one_token_is_not_padded(engine, monkeypatch, extra):
    """vLLM schedules placeholder drafts for it, to keep decode steps uniform."""
    core = engine.llm.llm_engine

    def note(_, output) -> list[int]:
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        return list(output.num_scheduled_tokens.values())

    steps = note_calls(monkeypatch, engine.core.scheduler, "_update_after_schedule", note)
    (running,) = params(1)
    core.add_request("running", {"prompt_token_ids": PROMPTS[2]}, running)
    core.step()
    late = SamplingParams(max_tokens=2, ignore_eos=True, extra_args=extra)
    core.add_request("late", {"prompt_token_ids": [7]}, late)
    while core.has_unfinished_requests():
        core.step()
    assert steps[1][-1] == (1 if extra else 25)


def test_a_wrong_value_is_refused(tree):
    (greedy,) = params(1)
    for given in (2, "no", None, [0], -1):
        request = SamplingParams(extra_args={"specblock_draft": given})
        with pytest.raises(VLLMValidationError, match=r'"specblock_draft" is .* true, false, 1 or'):
            tree.generate([PROMPTS[0]], request)
    assert len(tree.generate([PROMPTS[0]], greedy)[0][0].tokens) == greedy.max_tokens


@pytest.mark.parametrize("beside", [False, True])
def test_later_requests_draft_from_its_blocks(monkeypatch, beside):
    """The next turn of a chat reuses its blocks, and gets the same drafts."""
    following = shared_engine({"num_speculative_tokens": 24, "calibrate_drafts": False})
    text = PROMPTS[7][:45]
    found = []
    for opts_out in (False, True):
        assert following.llm.reset_prefix_cache()
        first = params(1, max_tokens=90)
        others = params(1, max_tokens=50) if beside else []
        if opts_out:
            opting_out(first)
        answers = following.generate([text, PROMPTS[1]][: 1 + beside], [*first, *others])
        drafts = record_drafts(following, monkeypatch)
        turn = [*text, *answers[0][0].tokens, 5, 6]
        (again,) = following.llm.generate(
            [{"prompt_token_ids": turn}], params(1, max_tokens=12)[0], use_tqdm=False
        )
        monkeypatch.undo()
        found.append((again.num_cached_tokens, drafts))
    assert found[0][0] >= 64
    assert found[0] == found[1]


def test_trees_made_to_hurt_the_others(tree, reference, monkeypatch):
    """Deep trees, all accepted: other requests run ahead."""
    expected = reference("greedy", params())
    install(monkeypatch, tree, "deep", expected)
    check(tree, opting_out(params(), every=2), expected)


CHAINS = (
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"bad_words": ["def"]},
    {"structured_outputs": StructuredOutputsParams(regex="[0-9]+")},
    {"thinking_token_budget": 8},
)
TREES = (
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7},
    {"logit_bias": {3: 1.5}, "allowed_token_ids": [3, 4], "min_tokens": 5, "logprobs": 2},
)


@pytest.mark.parametrize("given", [*CHAINS, *TREES])
def test_requests_whose_sampling_looks_back_verify_a_chain(given):
    assert looks_back(SamplingParams(**given)) == (given in CHAINS)
