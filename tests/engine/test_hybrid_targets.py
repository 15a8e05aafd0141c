"""Targets with recurrent layers, by small models of random weights."""

from __future__ import annotations

import random
import re

import pytest
import torch
from support.engines import configure, make_engine
from support.matrix import Checker
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
)
from vllm import SamplingParams

from vllm_specblock.config import OptionError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_hidden_layers": 5,
}
CONFIGS = {
    "Mamba-2": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **SIZES,
            layer_types=["mamba", "attention", "mamba", "mamba", "attention"],
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_chunk_size=32,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=96,
            position_embedding_type="rope",
            tie_word_embeddings=False,
        ),
    ),
    "short convolution": (
        Lfm2ForCausalLM,
        Lfm2Config(
            **SIZES,
            layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
            block_multiple_of=32,
            **dict.fromkeys(("conv_dim", "block_dim", "conv_dim_out"), 128),
            block_ff_dim=96,
            tie_word_embeddings=False,
        ),
    ),
}
DRAFTS = {"num_speculative_tokens": 12, "model": None, "kind": "ngram"}


@pytest.fixture(scope="module", params=CONFIGS)
def target(request, tmp_path_factory):
    """A model whose answers repeat themselves: layers add little to the embedding."""
    kind, config = CONFIGS[request.param]
    torch.manual_seed(0)
    model = kind(config)
    for name, weight in model.named_parameters():
        if re.search("embed_tokens|lm_head", name):
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else 0.5)
        elif weight.dim() == 2:
            leaf = re.search("out_proj|o_proj|w2|output_linear", name)
            torch.nn.init.normal_(weight, std=0.01 if leaf else 0.2)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "block_size": None,
        "kv_cache_memory_bytes": 16 << 20,
    }


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refused on a GPU")
only_mamba = pytest.mark.parametrize("target", ["Mamba-2"], indirect=True)


@pytest.fixture(scope="module")
def plain(target):
    return make_engine(None, **target, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def ours(target):
    return make_engine(DRAFTS, **target, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def prompts():
    """Texts in which n-grams come again, with different tokens after them."""
    draw = random.Random(1)
    made = []
    for length, words in ((40, 7), (150, 11), (21, 5), (97, 4)):
        book = [[draw.randrange(5, 64) for _ in range(3)] for _ in range(words)]
        made.append([token for _ in range(length) for token in draw.choice(book)][:length])
    return made


def requests_for(prompts, temperature):
    return [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True, detokenize=False
        )
        for seed in range(len(prompts))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_vllms_own_beside_prompts_in_chunks(plain, ours, prompts, temperature):
    requests = requests_for(prompts, temperature)
    expected = plain.generate(prompts, requests)
    check = Checker()
    check(ours, requests, expected, prompts)
    assert check.tokens > 200
    assert ours.metrics["vllm:spec_decode_num_accepted_tokens"] > 20, "hardly a tree was right"


@only_mamba
def test_pauses_leave_the_states_right(target, plain, prompts, monkeypatch):
    ours = make_engine({**DRAFTS, "enable_adaptive_verification": True}, **target)
    controller, turns = ours.runner.adaptive_verification.controller, iter(range(10**6))
    monkeypatch.setattr(controller, "drafts", lambda *args: next(turns) % 7 < 4)
    monkeypatch.setattr(controller, "budget", lambda survival, *args: survival.size // 3)
    requests = requests_for(prompts, 0.0)
    check = Checker()
    check(ours, requests, plain.generate(prompts, requests), prompts)
    assert next(turns) > 15


@only_mamba
def test_preempted_requests_begin_again(target, plain, prompts):
    few = {**target, "num_gpu_blocks_override": 7}
    ours = make_engine(DRAFTS, **few)
    requests = requests_for(prompts, 0.0)
    check = Checker()
    check(ours, requests, plain.generate(prompts, requests), prompts)
    assert ours.metrics["vllm:num_preemptions"] > 0


@only_mamba
def test_prefix_caching_is_off_and_refused(target):
    assert not configure(DRAFTS, target["model"]).cache_config.enable_prefix_caching
    with pytest.raises(OptionError, match="enable_prefix_caching is on"):
        configure(DRAFTS, target["model"], enable_prefix_caching=True)
