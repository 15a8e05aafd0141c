"""Targets with recurrent layers, by small models of random weights."""

from __future__ import annotations

import json

import pytest
import torch
from families import FAMILIES
from family_engine import draw_weights, repetitive_prompts
from support.engines import configure, make_engine
from support.matrix import Checker
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from vllm_specblock.config import OptionError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in checks/check_engines.py")

DRAFTS = {"num_speculative_tokens": 12, "model": None, "kind": "ngram"}
HYBRIDS = {"Mamba-2": "Granite 4 hybrid", "short convolution": "LFM2"}


@pytest.fixture(scope="module", params=HYBRIDS)
def target(request, tmp_path_factory):
    """Engine arguments of a model of random weights whose answers repeat themselves."""
    family, folder = FAMILIES[HYBRIDS[request.param]], tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(family.config))
    with pytest.MonkeyPatch.context() as patch:
        # Layers add little to the embedding.
        patch.setattr(DummyModelLoader, "load_weights", lambda _, x, __: draw_weights(x, 0.02))
        yield {
            "model": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 16 << 20,
            **family.engine,
        }


only_mamba = pytest.mark.parametrize("target", ["Mamba-2"], indirect=True)


@pytest.fixture(scope="module")
def plain(target):
    # With prefix caching, kernels that copy states are interpreted at every step.
    args = {**target, "enable_prefix_caching": False}
    return make_engine(None, **args, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def ours(target):
    return make_engine(DRAFTS, **target, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def prompts():
    return repetitive_prompts(1, (40, 7), (150, 11), (21, 5), (97, 4))


def requests_for(prompts, temperature=0.0, max_tokens=100):
    """Every other request is greedy, the rest have the temperature that is given."""
    common = {"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=temperature * (seed % 2), seed=seed, **common)
        for seed in range(len(prompts))
    ]


def test_tokens_are_vllms_own_beside_prompts_in_chunks(plain, ours, prompts):
    requests = requests_for(prompts, 0.8)
    expected = plain.generate(prompts, requests)
    check = Checker()
    check(ours, requests, expected, prompts)
    assert check.tokens > 200
    assert ours.metrics["vllm:spec_decode_num_accepted_tokens"] > 20, "hardly a tree was right"


@only_mamba
def test_pauses_and_preemptions_leave_the_states_right(target, plain, prompts, monkeypatch):
    few = {**target, "num_gpu_blocks_override": 7}
    ours = make_engine({**DRAFTS, "enable_adaptive_verification": True}, **few)
    controller, turns = ours.runner.adaptive_verification.controller, iter(range(10**6))
    monkeypatch.setattr(controller, "budget", lambda survival, *args: survival.size // 3)
    requests = requests_for(prompts)
    expected, check = plain.generate(prompts, requests), Checker()
    for most in (7, 4):  # of seven steps, how many draft
        monkeypatch.setattr(controller, "drafts", lambda *_, most=most: next(turns) % 7 < most)
        check(ours, requests, expected, prompts)
    assert next(turns) > 15 and ours.metrics["vllm:num_preemptions"] > 0


@only_mamba
def test_prefix_caching_is_off_and_refused(target):
    assert not configure(DRAFTS, target["model"]).cache_config.enable_prefix_caching
    with pytest.raises(OptionError, match="enable_prefix_caching is on"):
        configure(DRAFTS, target["model"], enable_prefix_caching=True)


@only_mamba
def test_engine_arguments_may_be_used_again(target):
    drafts = DRAFTS | {"method": "specblock"}
    args = EngineArgs(target["model"], skip_tokenizer_init=True, speculative_config=drafts)
    for _ in range(2):
        config = args.create_engine_config().scheduler_config
        assert not config.disable_hybrid_kv_cache_manager


def test_a_prompt_of_one_token_begins_without_a_state(plain, ours, prompts):
    """Beside others vLLM pads it with drafts; its block holds an earlier request's state."""
    texts = [*prompts, *prompts, [7], [8], [9]]  # the last three wait for one of eight to end
    requests = requests_for(texts, max_tokens=40)
    Checker()(ours, requests, plain.generate(texts, requests), texts)


def session(engine, prompts, name: str) -> list[list[int]]:
    """Answers to the parts of a streaming-input session."""
    llm, answers = engine.llm.llm_engine, []
    for part, prompt in enumerate([*prompts, None]):
        request = llm.input_processor.process_inputs(
            request_id=name,
            prompt={"prompt_token_ids": list(prompt or [3])},
            params=SamplingParams(max_tokens=20 + 3 * part, ignore_eos=True, temperature=0.0),
            supported_tasks=("generate",),
            resumable=prompt is not None,
        )
        request.external_req_id = name
        llm.engine_core.add_request(request)
        if prompt is not None:
            answers.append([])
        while prompt is not None:
            outputs = llm.engine_core.get_output().outputs
            answers[-1] += [token for each in outputs for token in each.new_token_ids]
            if any(each.finish_reason is not None for each in outputs):
                break
    return answers


def test_sessions_go_on_from_the_states_at_their_stops(plain, ours, prompts):
    """An accepted path may pass a stop, and a recurrent state cannot go back."""
    for number in range(2):
        parts = [prompts[number], *(each[:8] for each in prompts[:3])]
        found = [session(each, parts, f"session {number}") for each in (plain, ours)]
        assert found[0] == found[1], number
