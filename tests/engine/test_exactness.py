"""The promise: with SpecBlock, vLLM generates what it generates without, token for token.

Every test runs real vLLM both ways in float32 and compares tokens, reasons, text and
log-probabilities. Asynchronous scheduling: test_undrafted.py.
"""

from __future__ import annotations

import pytest
from support.drafters import install
from support.engines import Engine, make_engine, record_preemptions
from support.matrix import CASES, PROMPTS, Checker, crowded_engine, params, to_the_limit
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

check = Checker()


@pytest.mark.parametrize("name", CASES)
def test_sampling_parameters(tree: Engine, reference, name):
    check(tree, params(**CASES[name]), reference(name, params(**CASES[name])))


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


@pytest.mark.parametrize("change", [forbid_words, stop_at_tokens, stop_at_strings])
def test_parameters_that_name_tokens_of_the_answer(tree: Engine, plain: Engine, reference, change):
    requests, tokenizer = params(), plain.llm.get_tokenizer()
    said = reference("greedy", params())
    for index, (request, (answer,)) in enumerate(zip(requests, said)):
        change(request, index, answer.tokens, tokenizer)
    check(tree, requests, plain.generate(PROMPTS, requests))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_max_tokens_inside_a_path(tree: Engine, reference, length):
    name = f"max_tokens {length}"
    check(tree, params(max_tokens=length), reference(name, params(max_tokens=length)))


def test_several_samples(tree: Engine, plain: Engine):
    requests = [
        SamplingParams(n=3, temperature=1.0, seed=7 + i, max_tokens=30, ignore_eos=True)
        for i in range(4)
    ]
    check(tree, requests, plain.generate(PROMPTS[:4], requests), PROMPTS[:4])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_outputs(tree: Engine, plain: Engine, temperature):
    """Grammars and free requests in one batch."""
    requests = params(temperature=temperature)
    for index, request in enumerate(requests):
        if index % 2:
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


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("scattered", "greedy"),
        ("scattered", "temperature 1"),
        ("deep", "greedy"),
        ("twins", "temperature 1"),
        ("empty", "temperature 1"),
    ],
)
def test_trees_made_to_hurt(tree: Engine, reference, monkeypatch, kind, name):
    expected = reference(name, params(**CASES[name]))
    install(monkeypatch, tree, kind, expected)
    check(tree, params(**CASES[name]), expected)


def test_crowded(reference, monkeypatch):
    """Chunked prefill, preemption and the length limit at once, with deep and wrong drafts."""
    crowded = crowded_engine({"num_speculative_tokens": 16})
    preempted = record_preemptions(crowded)
    for temperature in (0.0, 1.0):
        requests = to_the_limit(temperature)
        expected = reference(f"to the limit, {temperature}", requests)
        check(crowded, requests, expected)
        with monkeypatch.context() as patch:
            install(patch, crowded, "scattered", expected)
            check(crowded, requests, expected)
    assert preempted, "the cache was large enough for everybody: this tested no preemption"


@pytest.mark.parametrize(("nodes", "blocks"), [(1, 1), (60, 3)])
def test_sizes_of_trees(reference, nodes, blocks):
    engine = make_engine({"num_speculative_tokens": nodes, "num_blocks": blocks})
    for name in ("greedy", "temperature 1"):
        check(engine, params(**CASES[name]), reference(name, params(**CASES[name])))
