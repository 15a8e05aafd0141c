"""Engines with settings of their own say what vLLM says."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.engines import MARKERS, TARGET, Engine, assert_identical, make_engine, shared_engine
from support.matrix import PROMPTS, Checker, half_sampled, params
from support.targets import edit_config
from vllm import SamplingParams
from vllm_specblock.triton_kernels.layers.fp8_linear import Fp8Linear

LOOKUP = {"num_speculative_tokens": 12, "second_drafter": {"kind": "ngram"}}
MERGED = LOOKUP | {"draft_policy": "merge"}


def test_a_length_that_vllm_fits_to_the_cache(plain: Engine):
    """`max_model_len` "auto" (−1): the limit is lowered after the drafters are built."""
    engine = make_engine(LOOKUP, max_model_len=-1, kv_cache_memory_bytes=1 << 20)
    limit = engine.core.vllm_config.model_config.max_model_len
    assert limit < 512, "everything fits: nothing was tested"
    drafters = engine.speculator.draft_policy.drafters
    assert [drafter.max_model_len for drafter in drafters] == [limit, limit]
    texts = [text for text in PROMPTS if len(text) < limit]
    to_the_limit = [
        SamplingParams(temperature=0, max_tokens=limit - len(text), ignore_eos=True)
        for text in texts
    ]
    assert_identical(engine.generate(texts, to_the_limit), plain.generate(texts, to_the_limit))


@pytest.mark.skipif(
    torch.cuda.is_available() or not torch.cpu._is_avx512_supported(),
    reason="vLLM has it on CPUs with AVX-512; on a GPU it needs bfloat16",
)
def test_a_kv_cache_of_8_bits(reference):
    plain, ours = (
        make_engine(each, kv_cache_dtype="fp8") for each in (None, {"num_speculative_tokens": 24})
    )
    for temperature in (0.0, 1.0):
        requests = params(4, temperature=temperature, max_tokens=100)
        expected = plain.generate(PROMPTS[:4], requests)
        usual = reference(f"four long answers, {temperature}", requests, PROMPTS[:4])
        assert [one.tokens for (one,) in expected] != [one.tokens for (one,) in usual]
        Checker()(ours, requests, expected, PROMPTS[:4])
    counts = ours.speculator.counters.as_dict()
    accepted = sum(n for (name, _), n in counts.items() if name == "accepted_nodes")
    assert accepted > 100, "hardly a tree was right: this tested little"


def test_long_prompts_in_chunks(tmp_path):
    """Thousands, with RoPE scaled beyond the trained length; every other layer sees 48."""
    layers = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
    kinds = [["sliding_attention", "full_attention"][i % 2] for i in range(layers)]
    target = shutil.copytree(TARGET, tmp_path / "target")
    edit_config(target, sliding_window=48, layer_types=kinds)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
    settings = {
        "model": str(target),
        "hf_overrides": {
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_theta": 10000.0, **yarn},
        },
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
    }
    draw = random.Random(3)
    unit = [draw.randrange(3, 2048) for _ in range(37)]
    to_the_limit = (unit * 111)[: 4096 - 24]
    texts = [to_the_limit, [draw.randrange(3, 2048) for _ in range(2100)], [7] * 1200]
    plain = make_engine(None, **settings)
    engine = make_engine(MERGED, **settings)
    requests = half_sampled(3, max_tokens=24)
    ours, theirs = (each.generate(texts, requests) for each in (engine, plain))
    assert assert_identical(ours, theirs) == 72
    assert engine.metrics["vllm:spec_decode_num_accepted_tokens"] > 20


def test_prompts_as_embeddings(plain: Engine):
    """Prompts of both kinds share a batch; long ones are chunked."""
    engine = make_engine(MERGED, enable_prompt_embeds=True, max_num_batched_tokens=96)
    table = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()
    texts = PROMPTS[:6]
    requests = [
        {"prompt_token_ids": text} if index % 3 == 0 else {"prompt_embeds": table[text]}
        for index, text in enumerate(texts)
    ]
    asked = half_sampled(len(texts), max_tokens=24)
    found = engine.llm.generate(requests, asked, use_tqdm=False)
    expected = plain.generate(texts, asked)
    assert [list(answer.outputs[0].token_ids) for answer in found] == [
        one.tokens for (one,) in expected
    ]


def test_thinking_ends_at_its_budget():
    plain, tree = (
        shared_engine(speculative, reasoning_config=MARKERS)
        for speculative in (None, {"num_speculative_tokens": 12})
    )
    ids = plain.llm.get_tokenizer().encode
    start, end = (ids(text, add_special_tokens=False) for text in MARKERS.values())
    assert len(end) > 1
    texts = [[*text[:50], *start] for text in PROMPTS]
    budgets = [0, 1, 7, 16, 30, None, 7, 3, 100, 12]
    requests = half_sampled(max_tokens=40)
    for request, budget in zip(requests, budgets):
        request.thinking_token_budget = budget
    expected = plain.generate(texts, requests)
    Checker()(tree, requests, expected, texts)
    for budget, (answer,) in zip(budgets, expected):
        unforced = answer.tokens[:budget]
        if budget is not None and budget < 30 and not {*start, *end} & {*unforced}:
            assert answer.tokens[budget : budget + len(end)] == end


def test_a_drafter_in_8_bits(plain: Engine):
    """Other drafts now and then, never other tokens."""
    engine = make_engine({"num_speculative_tokens": 20, "quantization": "fp8"})
    (head,) = engine.speculator.draft_policy.drafters
    assert isinstance(head.model.lm_head, Fp8Linear)
    sampling = half_sampled(4, max_tokens=40)
    assert engine.generate(PROMPTS[:4], sampling) == plain.generate(PROMPTS[:4], sampling)
    accepted = engine.speculator.counters.as_dict()["accepted_nodes", 1]
    assert accepted > 40, "hardly a draft was right"
