"""LoRA adapters on the target: two of them and requests without any, in one batch of trees."""

from __future__ import annotations

import pytest
import torch
from support.engines import make_engine
from support.lora_adapters import RANK, write_adapter
from support.matrix import PROMPTS, params
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refused on a GPU")

# As many adapters as there are slots: none of them is empty.
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
# vLLM's kernels for CPUs copy an adapter for every token: the shorter prompts will do.
TEXTS = sorted(PROMPTS, key=len)[:6]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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
    before = ours.speculator.counters.as_dict()["accepted_nodes_1"]
    expected = say(adapted, requests, adapters)
    got = say(ours, requests, adapters)
    assert got == expected
    without = reference(f"without adapters, {temperature}", requests, TEXTS)
    for index, (mine, (base,)) in enumerate(zip(got, without)):
        assert (mine == base.tokens) == (index % len(adapters) == 0), "adapters change what is said"
    accepted = ours.speculator.counters.as_dict()["accepted_nodes_1"] - before
    assert accepted > 40, "hardly a tree was right: this tested little"
