"""Targets and drafters of real sizes and no training: configs for vLLM's dummy loader, weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from vllm_specblock.drafters.common.config import default_layer_ids
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train import untrained


@dataclass(frozen=True)
class Model:
    """A target's config, and Vd of its drafters."""

    target: PretrainedConfig
    draft_vocab: int


_EIGHT_B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MODELS = {
    "llama-8b": Model(  # Llama-3.1-8B
        LlamaConfig(
            intermediate_size=14336,
            num_hidden_layers=32,
            vocab_size=128256,
            max_position_embeddings=131072,
            **_EIGHT_B,
        ),
        draft_vocab=32000,
    ),
    "qwen3-8b": Model(
        Qwen3Config(
            intermediate_size=12288,
            num_hidden_layers=36,
            vocab_size=151936,
            max_position_embeddings=40960,
            **_EIGHT_B,
        ),
        draft_vocab=32000,
    ),
    "tiny": Model(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=384,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            num_hidden_layers=8,
            vocab_size=160,
        ),
        draft_vocab=96,
    ),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_target(folder: Path, model: Model, length: int) -> Path:
    """A folder with the target's config and nothing else, for prompts and answers of `length`."""
    model.target.save_pretrained(folder)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw |= {
        "architectures": [ARCHITECTURES[model.target.model_type]],
        "max_position_embeddings": max(length, model.target.max_position_embeddings),
    }
    path.write_text(json.dumps(raw))
    return folder


def write_drafter(folder: Path, target: Path, model: Model) -> Path:
    """An untrained SpecBlock drafter in bf16. The engine reads a drafter's weights also where the
    target's are dummies: 1.5 GB at the size of an 8B target."""
    drafter = untrained.init(target, draft_vocab_size=model.draft_vocab, target_name="random")
    checkpoint.save(drafter.to(torch.bfloat16), folder)
    return folder


def write_eagle3(folder: Path, model: Model) -> Path:
    """The config of an EAGLE-3 drafter: one decoder layer like the target's, for the dummy loader.

    Its layer is Llama's for every target, as those of published EAGLE-3 drafters are.
    """
    target, folder = model.target, Path(folder)
    layers = list(default_layer_ids(target.num_hidden_layers))
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    raw = {name: getattr(target, name) for name in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": model.draft_vocab,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layers,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
