"""Untrained targets and drafters of real sizes: configs for vLLM's dummy loader, and weights."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from vllm_specblock.drafters.common.config import default_layer_ids
from vllm_specblock.train import saving, untrained


@dataclass(frozen=True)
class Model:
    """A target's config, and Vd of its drafters."""

    target: PretrainedConfig
    draft_vocab: int


_NAMES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_NAMES += ("intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
_LLAMA = 4096, 32, 8, 128, 14336, 32, 128256, 131072
_QWEN = 4096, 32, 8, 128, 12288, 36, 151936, 40960
_TINY = 256, 8, 2, 32, 384, 8, 160, 2048
MODELS = {
    "llama-8b": Model(LlamaConfig(**dict(zip(_NAMES, _LLAMA))), draft_vocab=32000),  # Llama-3.1-8B
    "qwen3-8b": Model(Qwen3Config(**dict(zip(_NAMES, _QWEN))), draft_vocab=32000),
    "tiny": Model(LlamaConfig(**dict(zip(_NAMES, _TINY))), draft_vocab=96),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_target(folder: Path, model: Model, length: int) -> Path:
    """Write the target's config alone, for prompts and answers of `length`."""
    target = copy(model.target)
    target.architectures = [ARCHITECTURES[target.model_type]]
    target.max_position_embeddings = max(length, target.max_position_embeddings)
    target.save_pretrained(folder)
    return folder


def write_drafter(folder: Path, target: Path, model: Model) -> Path:
    """Write an untrained SpecBlock drafter in bf16 (1.5 GB for an 8B target): the engine reads its
    weights even where the target's are dummies."""
    drafter = untrained.init(target, draft_vocab_size=model.draft_vocab, target_name="random")
    saving.save(drafter.to(torch.bfloat16), folder)
    return folder


def write_eagle3(folder: Path, model: Model) -> Path:
    """Write the config of an EAGLE-3 drafter, for the dummy loader: one Llama layer of the
    target's sizes, as published EAGLE-3 drafters have for every target."""
    target = model.target
    layers = list(default_layer_ids(target.num_hidden_layers))
    like = {name: getattr(target, name) for name in (*_NAMES, "rms_norm_eps")}
    LlamaConfig(
        **like | {"num_hidden_layers": 1},
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=model.draft_vocab,
        eagle_aux_hidden_state_layer_ids=layers,
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
    ).save_pretrained(folder)
    return folder
