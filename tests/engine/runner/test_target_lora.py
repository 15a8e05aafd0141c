"""LoRA adapters on the target: two of them and requests without any, in one batch of trees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import TARGET, make_engine
from support.matrix import PROMPTS, params
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refused on a GPU")

RANK = 8
# As many adapters as there are slots: none of them is empty.
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
# vLLM's kernels for CPUs copy an adapter for every token: the shorter prompts will do.
TEXTS = sorted(PROMPTS, key=len)[:6]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(folder: Path, seed: int, modules: list[str]) -> Path:
    """A random adapter in PEFT's files, of `modules` in every layer, `embed_tokens`, `lm_head`."""
    draw = torch.Generator().manual_seed(seed)
    # The target's LM head is its embedding.
    weights = load_file(TARGET / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    tensors = {}
    for name, weight in weights.items():
        *_, module, _ = name.split(".")
        if module not in modules:
            continue
        (out, width), prefix = weight.shape, f"base_model.model.{name.removesuffix('weight')}"
        if module == "embed_tokens":
            down = torch.randn(RANK, out, generator=draw)
            tensors[f"{prefix}lora_embedding_A"] = down
            up = torch.randn(width, RANK, generator=draw) * 0.005
            tensors[f"{prefix}lora_embedding_B"] = up
        else:
            down = torch.randn(RANK, width, generator=draw) * width**-0.5
            tensors[f"{prefix}lora_A.weight"] = down
            tensors[f"{prefix}lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": RANK}
    config |= {"lora_alpha": 2 * RANK, "target_modules": modules}
    config["base_model_name_or_path"] = str(TARGET)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[LoRARequest | None]:
    """None, one of all linear layers, and one of few layers, embedding and LM head."""
    folder = tmp_path_factory.mktemp("adapters")
    one = write_adapter(folder / "one", 1, LINEAR)
    two = write_adapter(folder / "two", 2, ["q_proj", "v_proj", "embed_tokens", "lm_head"])
    return [None, LoRARequest("one", 1, str(one)), LoRARequest("two", 2, str(two))]


@pytest.fixture(scope="module")
def ours(adapters):
    return make_engine({"num_speculative_tokens": 24}, **LORA)


@pytest.fixture(scope="module")
def adapted(ours, adapters):
    """vLLM without us, once its kernels leave requests without an adapter alone."""
    return make_engine(None, **LORA)


def say(engine, requests, adapters) -> list[list[int]]:
    """Tokens of all texts; the adapters take turns."""
    turns = [adapters[index % len(adapters)] for index in range(len(TEXTS))]
    texts = [{"prompt_token_ids": text} for text in TEXTS]
    answers = engine.llm.generate(texts, requests, lora_request=turns, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_vllms_own(ours, adapted, adapters, reference, temperature):
    requests = params(len(TEXTS), temperature=temperature, max_tokens=50)
    before = ours.speculator.counters.as_dict()["accepted_nodes", 1]
    expected = say(adapted, requests, adapters)
    got = say(ours, requests, adapters)
    assert got == expected
    without = reference(f"without adapters, {temperature}", requests, TEXTS)
    for index, (mine, (base,)) in enumerate(zip(got, without)):
        assert (mine == base.tokens) == (index % len(adapters) == 0), "adapters change what is said"
    accepted = ours.speculator.counters.as_dict()["accepted_nodes", 1] - before
    assert accepted > 40, "hardly a tree was right: this tested little"
