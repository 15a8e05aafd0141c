"""The promise: with SpecBlock, vLLM generates what it generates without, token for token.

Every test runs real vLLM both ways in float32 and compares tokens, reasons, text and
log-probabilities. Asynchronous scheduling: test_undrafted.py.
"""

from __future__ import annotations

import pytest
from support.drafters import install
from support.engines import Engine, make_engine, record_preemptions
from support.matrix import (
    PROMPTS,
    Checker,
    crowded_engine,
    every_case,
    half_sampled,
    params,
    to_the_limit,
)
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

check = Checker()


def test_sampling_parameters(tree: Engine, reference):
    texts, requests = every_case()
    check(tree, requests, reference("every case", requests, texts), texts)


def forbid_words(request: SamplingParams, _, tokens: list[int], __) -> None:
    request._bad_words_token_ids = [tokens[4:5], tokens[8:10]]
    request.bad_words = ["a word"]  # what marks a request; the ids above are what counts


def stop_at_tokens(request: SamplingParams, index: int, tokens: list[int], _) -> None:
    """Inside accepted paths, whose rest must not be seen."""
    request.stop_token_ids = [tokens[11 + index]]
    request.min_tokens = 9 if index % 2 else 0
    request.__post_init__()


def stop_at_strings(request: SamplingParams, _, tokens: list[int], tokenizer) -> None:
    request.stop = [tokenizer.decode(tokens[13:16])]
    request.output_kind = RequestOutputKind.CUMULATIVE
    request.__post_init__()


def test_parameters_that_name_tokens_of_the_answer(tree: Engine, plain: Engine, reference):
    requests, tokenizer = params(), plain.llm.get_tokenizer()
    said, changes = reference("greedy", params()), (forbid_words, stop_at_tokens, stop_at_strings)
    for index, (request, (answer,)) in enumerate(zip(requests, said)):
        changes[index % 3](request, index, answer.tokens, tokenizer)
    check(tree, requests, plain.generate(PROMPTS, requests))


def test_max_tokens_inside_a_path(tree: Engine, plain: Engine):
    requests = params()
    for index, request in enumerate(requests):
        request.max_tokens = (1, 2, 5)[index % 3]
    check(tree, requests, plain.generate(PROMPTS, requests))


def test_several_samples(tree: Engine, plain: Engine):
    requests = [
        SamplingParams(n=3, temperature=1.0, seed=7 + i, max_tokens=30, ignore_eos=True)
        for i in range(4)
    ]
    check(tree, requests, plain.generate(PROMPTS[:4], requests), PROMPTS[:4])


def test_structured_outputs(tree: Engine, plain: Engine):
    """Grammars and free requests in one batch."""
    requests = half_sampled()
    for index, request in enumerate(requests):
        if index % 3:
            request.structured_outputs = StructuredOutputsParams(regex="(ab|ba|[0-9]){10,40}")
            request.ignore_eos = False
    check(tree, requests, plain.generate(PROMPTS, requests))


def test_aborts(tree: Engine, reference):
    """Requests aborted in the middle of a step do not disturb the others."""
    expected = reference("greedy", params())
    engine = tree.llm.llm_engine
    for index, (text, request) in enumerate(zip(PROMPTS, params())):
        engine.add_request(f"abort-{index}", {"prompt_token_ids": text}, request)
    done: dict[str, list[int]] = {}
    for step in range(2000):
        if step == 4:
            engine.abort_request([f"abort-{index}" for index in range(0, len(PROMPTS), 3)])
        for answer in engine.step():
            if answer.finished and answer.outputs[0].finish_reason != "abort":
                done[answer.request_id] = list(answer.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    kept = [index for index in range(len(PROMPTS)) if index % 3]
    assert sorted(done) == sorted(f"abort-{index}" for index in kept)
    for index in kept:
        assert done[f"abort-{index}"] == expected[index][0].tokens


def test_interrupted_and_used_again(tree: Engine, reference, monkeypatch):
    """Ctrl-C in `LLM.generate`: vLLM keeps its requests, and the next call answers them first."""
    expected = reference("greedy", params())
    engine, steps = tree.llm.llm_engine, iter(range(10_000))
    step = engine.step

    def interrupted():
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tree.generate(PROMPTS, params())
    check(tree, params(), [*expected, *expected])


@pytest.mark.parametrize("kind", ["scattered", "deep", "twins", "empty"])
def test_trees_made_to_hurt(tree: Engine, reference, monkeypatch, kind):
    expected = reference("half sampled", half_sampled())
    install(monkeypatch, tree, kind, expected)
    check(tree, half_sampled(), expected)


def test_crowded(reference, monkeypatch):
    """Chunked prefill, preemption and the length limit at once, with deep and wrong drafts."""
    crowded = crowded_engine({"num_speculative_tokens": 16})
    preempted = record_preemptions(crowded)
    requests = to_the_limit()
    expected = reference("to the limit", requests)
    check(crowded, requests, expected)
    install(monkeypatch, crowded, "scattered", expected)
    check(crowded, requests, expected)
    assert preempted, "the cache was large enough for everybody: this tested no preemption"


@pytest.mark.parametrize(("nodes", "blocks"), [(1, 1), (60, 3)])
def test_sizes_of_trees(reference, nodes, blocks):
    engine = make_engine({"num_speculative_tokens": nodes, "num_blocks": blocks})
    check(engine, half_sampled(), reference("half sampled", half_sampled()))
