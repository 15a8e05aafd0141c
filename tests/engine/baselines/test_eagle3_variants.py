"""Our EAGLE-3 drafter matches vLLM's own `eagle3` for every checkpoint variant.

Heads are random, so that nearly every draft is wrong and each step is another text to compare.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.committed import along_a_chain, own_caches
from support.engines import TARGET, make_engine, prompts, record_drafts
from vllm import SamplingParams

from vllm_specblock.drafters.eagle3.checkpoint import FILES
from vllm_specblock.drafters.eagle3.config import from_json
from vllm_specblock.drafters.eagle3.drafter import Eagle3Drafter
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.options import Eagle3Config
from vllm_specblock.engine.runner.speculator import TreeSpeculator
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
    """The authors' layout: two layers, every bias, one norm before fc, llama3 RoPE; embedding, LM
    head and vocabulary are the target's."""
    return layer_json(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        num_hidden_layers=2,
        attention_bias=True,
        mlp_bias=True,
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
    """Qwen3, every other norm, YaRN over half of each head, a mapping, LM head and embedding."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 1500,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "transformer_layer_config": layer_json(
            model_type="qwen3",
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
            },
        ),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTED}],
            "verifier": {"name_or_path": str(TARGET), "architectures": ["LlamaForCausalLM"]},
        },
        "torch_dtype": "float32",
    }


def write(directory: Path, raw: dict, whole: bool) -> None:
    """whole: with embedding, LM head and mapping, as safetensors; else without, in two .bin."""
    torch.manual_seed(0)
    drafter = Eagle3Model(from_json(raw, "config.json"), own_embedding=whole)
    with torch.no_grad():
        for weight in drafter.parameters():
            # Large enough for every part of the layer to tell.
            weight.uniform_(0.5, 1.5) if weight.dim() == 1 else weight.normal_(std=0.2)
    shape = drafter.config
    named = torch.randperm(shape.vocab_size)[: shape.draft_vocab_size].sort().values
    drafter.d2t.copy_(named - torch.arange(len(named)))
    tensors = {n.replace("midlayer", "layers.0"): t for n, t in drafter.state_dict().items()}
    if whole:
        save_file(tensors, directory / "model.safetensors")
    else:
        del tensors["d2t"], tensors["lm_head.weight"]
        names = sorted(tensors)
        for part, chosen in enumerate((names[:9], names[9:]), start=1):
            shard = {name: tensors[name] for name in chosen}
            torch.save(shard, directory / f"pytorch_model-0000{part}-of-00002.bin")
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.fixture(scope="module")
def teacher() -> OnlineTeacher:
    target = load_target(TARGET, "fp32", torch.device("cpu"))
    return OnlineTeacher(target, LAYERS, torch.arange(2048))


@pytest.mark.parametrize(("make", "whole"), [(flat, False), (speculators, True)])
@torch.no_grad()
def test_step_by_step_the_same_draft(make, whole, teacher, tmp_path, monkeypatch):
    write(tmp_path, make(), whole)
    # Where it names its target vLLM finds it, and its method.
    asked = {"method": "eagle3", "num_speculative_tokens": DRAFTED}
    named = {"model": str(tmp_path)}
    engine = make_engine(asked, **named) if whole else make_engine(asked | named)
    assert not isinstance(engine.speculator, TreeSpeculator)
    drafts = record_drafts(engine, monkeypatch)
    model = FILES.load(tmp_path)
    assert model.wants_head is not whole
    if model.wants_head:
        model.share_head(teacher.head)
    head = Eagle3Drafter(
        model, teacher.embed, Eagle3Config(depth=DRAFTED, top_k=1), DRAFTED, MAX_LEN
    )
    table, same, steps = own_caches(head, MAX_LEN, PAGE), 0, 0
    for prompt in PROMPTS:
        drafts.clear()
        ((answer,),) = engine.generate([prompt], GREEDY)
        text = torch.tensor(prompt + answer.tokens)
        hidden = teacher.teach(Batch.of(text[None])).hidden
        states = torch.stack(hidden.chunk(len(LAYERS), dim=-1))  # [L, 1, n, Ht]
        trees = along_a_chain(head, prompt, answer.tokens, drafts, states, table, PAGE)
        for theirs, tree in zip(drafts, trees):
            same += tree.token[0].tolist() == theirs
            steps += 1
    assert steps > 40
    # Two tokens that score the same to the last bits may change places.
    assert same >= steps - 1, f"{same} of {steps}"
