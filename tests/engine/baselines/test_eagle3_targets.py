"""EAGLE-3 trees for random targets of the families that published heads are for.

Drafters are what `research/baselines/eagle3.py` saves, which vLLM's own `eagle3` loads, too. A
lookup goes with them, so that paths are accepted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from baselines.eagle3 import Eagle3
from support.engines import TARGET, assert_identical, make_engine, prompts, record_drafts
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from vllm import SamplingParams
from vllm.distributed import parallel_state

H, V, DRAFT_V, WORDS = 64, 2048, 1500, 48
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
TARGETS = {
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}
PROMPTS = prompts(4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.3, seed=11, max_tokens=24, ignore_eos=True)


@torch.no_grad()
def write_target(folder: Path, config: PreTrainedConfig) -> None:
    """One that says few tokens, mostly by the last one alone, and so repeats itself."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.mul_(5)
    model.get_output_embeddings().weight[WORDS:].zero_()
    model.save_pretrained(folder)
    for path in TARGET.glob("*token*"):
        shutil.copy(path, folder)


def write_drafter(folder: Path, target: PreTrainedConfig) -> None:
    """In the layout of the EAGLE authors; it reads the layers that the target offers."""
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[torch.randperm(V, generator=torch.Generator().manual_seed(4))[:DRAFT_V]] = True
    d2t = t2d.nonzero()[:, 0] - torch.arange(DRAFT_V)
    Eagle3.for_target(target, d2t, t2d, seed=4).save(folder)


@pytest.fixture(autouse=True)
def experts(monkeypatch):
    """A process makes its groups with its first engine, of experts only if that one has some: of
    one rank it is that of tensor parallelism."""
    if parallel_state._EP is None and parallel_state._TP is not None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state._TP)


@pytest.mark.parametrize("family", TARGETS)
def test_a_tree_for_it(family, tmp_path, monkeypatch):
    write_target(tmp_path / "target", TARGETS[family])
    write_drafter(tmp_path / "drafter", TARGETS[family])
    target, drafter = str(tmp_path / "target"), str(tmp_path / "drafter")

    chain = make_engine(
        {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}, model=target
    )
    wanted = record_drafts(chain, monkeypatch)
    expected = chain.generate(PROMPTS[-1:], GREEDY)

    alone = make_engine({"model": drafter, "num_speculative_tokens": 6}, model=target)
    drafts = record_drafts(alone, monkeypatch)
    assert_identical(alone.generate(PROMPTS[-1:], GREEDY), expected)
    # Of the first step each: after it they may go on from different texts.
    assert drafts[0][0] == wanted[0][0] and len(set(drafts[0])) > 1

    plain = make_engine(None, model=target)
    merged = make_engine(
        {
            "model": drafter,
            "num_speculative_tokens": 12,
            "second_drafter": {"kind": "ngram"},
            "draft_policy": "merge",
        },
        model=target,
    )
    for params in (GREEDY, SAMPLED):
        assert_identical(merged.generate(PROMPTS, params), plain.generate(PROMPTS, params))
    drafts = record_drafts(merged, monkeypatch)
    ((answer,),) = merged.generate(PROMPTS[-1:], GREEDY)
    assert len(drafts) < len(answer.tokens)  # something was accepted
