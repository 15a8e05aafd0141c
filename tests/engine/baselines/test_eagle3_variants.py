"""Our EAGLE-3 head computes what vLLM's own `eagle3` computes, whatever a checkpoint varies.

Heads are random, so that nearly every draft is wrong and each step is another text to compare.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.committed import rows_of
from support.engines import TARGET, make_engine, prompts, record_drafts
from vllm import SamplingParams

from vllm_specblock.config import Eagle3Config
from vllm_specblock.drafters.eagle3 import checkpoint
from vllm_specblock.drafters.eagle3.config_json import from_json
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.target.features import OnlineTeacher, load_target

DRAFTED, LAYERS, PAGE, MAX_LEN = 3, (2, 3, 4), 16, 256
PROMPTS = prompts(3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def layer_json(**changes) -> dict:
    target = json.loads((TARGET / "config.json").read_text())
    return {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }


def flat() -> dict:
    """The authors' layout, with biases, one norm before fc, llama3 RoPE, no mapping."""
    return layer_json(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        attention_bias=True,
        rope_theta=5000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        eagle_aux_hidden_state_layer_ids=LAYERS,
        eagle_config={"norm_before_fc": True, "use_aux_hidden_state": True},
    )


def speculators() -> dict:
    """Qwen3, every other norm, a mapping and an embedding of its own."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 1500,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "transformer_layer_config": layer_json(model_type="qwen3", rope_theta=5000.0),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTED}],
            "verifier": {"name_or_path": str(TARGET), "architectures": ["LlamaForCausalLM"]},
        },
        "torch_dtype": "float32",
    }


def write(directory: Path, raw: dict, own_embedding: bool) -> None:
    torch.manual_seed(0)
    drafter = Eagle3Model(from_json(raw, "config.json"), own_embedding)
    with torch.no_grad():
        for weight in drafter.parameters():
            # Large enough for every part of the layer to tell.
            weight.uniform_(0.5, 1.5) if weight.dim() == 1 else weight.normal_(std=0.2)
    shape = drafter.config
    named = torch.randperm(shape.vocab_size)[: shape.draft_vocab_size].sort().values
    drafter.d2t.copy_(named - torch.arange(len(named)))
    tensors = {n.replace("midlayer", "layers.0"): t for n, t in drafter.state_dict().items()}
    if shape.draft_vocab_size == shape.vocab_size:
        del tensors["d2t"]
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.fixture(scope="module")
def teacher() -> OnlineTeacher:
    target = load_target(TARGET, "fp32", torch.device("cpu"))
    return OnlineTeacher(target, LAYERS, torch.arange(2048))


@pytest.mark.parametrize(("make", "own_embedding"), [(flat, False), (speculators, True)])
def test_step_by_step_the_same_draft(make, own_embedding, teacher, tmp_path, monkeypatch):
    write(tmp_path, make(), own_embedding)
    engine = make_engine(
        {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": DRAFTED}
    )
    drafts = record_drafts(engine, monkeypatch)
    head = Eagle3Drafter(
        checkpoint.load(tmp_path),
        teacher.embed,
        Eagle3Config(depth=DRAFTED, top_k=1),
        DRAFTED,
        MAX_LEN,
    )
    layer = head.cache_layers()[0]
    pages = MAX_LEN // PAGE + 1
    cache = torch.zeros(pages, PAGE, layer.num_kv_heads, 2 * layer.head_dim).transpose(1, 2)
    head.bind([cache])
    table = torch.arange(1, pages)[None]
    same = steps = 0
    for prompt in PROMPTS:
        drafts.clear()
        ((answer,),) = engine.generate([prompt], GREEDY)
        text = torch.tensor(prompt + answer.tokens)
        hidden = teacher.teach(Batch.of(text[None])).hidden
        states = torch.stack(hidden.chunk(len(LAYERS), dim=-1))  # [L, 1, n, Ht]
        root = len(prompt)
        for theirs in drafts:
            if root + DRAFTED >= len(text):
                break
            with torch.no_grad():
                head.advance(rows_of([(0, root)], table, states, text[None], PAGE))
                ours = head.draft().token[0].tolist()
            same += ours == theirs
            steps += 1
            wanted = text[root + 1 :].tolist()
            root += 1 + next((k for k in range(DRAFTED) if theirs[k] != wanted[k]), DRAFTED)
    assert steps > 40
    # Two tokens that score the same to the last bits may change places.
    assert same >= steps - 1, f"{same} of {steps}"
