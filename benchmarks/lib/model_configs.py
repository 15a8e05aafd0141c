"""Untrained targets and drafters of real sizes: configs for vLLM's dummy loader, and weights."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import torch
from transformers import Lfm2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from vllm_specblock.drafters.common.config import default_layer_ids
from vllm_specblock.train import saving, untrained

_NAMES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_NAMES += ("intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")


def _config(kind: type[PretrainedConfig], *sizes: int, **more: Any) -> PretrainedConfig:
    name = kind.__name__.replace("Config", "ForCausalLM")
    return kind(**dict(zip(_NAMES, sizes)), architectures=[name], **more)


_CONV = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), 1024)
_CONV |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}
MODELS = {
    "llama-8b": _config(LlamaConfig, 4096, 32, 8, 128, 14336, 32, 128256, 131072),  # Llama-3.1-8B
    "qwen3-8b": _config(Qwen3Config, 4096, 32, 8, 128, 12288, 36, 151936, 40960),
    "lfm2-350m": _config(Lfm2Config, 1024, 16, 8, 64, 6656, 16, 65536, 128000, **_CONV),
    "tiny": _config(LlamaConfig, 256, 8, 2, 32, 384, 8, 160, 2048),
}


def _draft_vocab(target: PretrainedConfig) -> int:
    return min(32000, target.vocab_size * 3 // 5)


def write_target(folder: Path, target: PretrainedConfig, length: int) -> Path:
    """Write the target's config alone, for prompts and answers of `length`."""
    target = copy(target)
    target.max_position_embeddings = max(length, target.max_position_embeddings)
    target.save_pretrained(folder)
    return folder


def _llama(target: PretrainedConfig, **more: Any) -> LlamaConfig:
    """Return the config of a Llama of the target's sizes."""
    return LlamaConfig(**{name: getattr(target, name) for name in _NAMES} | more)


def write_drafter(folder: Path, target: PretrainedConfig) -> Path:
    """Write an untrained SpecBlock drafter in bf16 (1.5 GB for an 8B target): the engine reads its
    weights even where the target's are dummies. Its layers are the target's, or a Llama's."""
    like = target if target.model_type in ("llama", "qwen3") else _llama(target)
    like.save_pretrained(folder)
    drafter = untrained.init(folder, draft_vocab_size=_draft_vocab(target), target_name="random")
    saving.save(drafter.to(torch.bfloat16), folder)
    return folder


def write_eagle3(folder: Path, target: PretrainedConfig) -> Path:
    """Write the config of an EAGLE-3 drafter, for the dummy loader: one Llama layer of the
    target's sizes, as published EAGLE-3 drafters have for every target."""
    layers = list(default_layer_ids(target.num_hidden_layers))
    _llama(
        target,
        num_hidden_layers=1,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=_draft_vocab(target),
        eagle_aux_hidden_state_layer_ids=layers,
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
    ).save_pretrained(folder)
    return folder
