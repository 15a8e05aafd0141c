"""LoRA adapters on the target: the rows of logits, and embeddings without adapters.

Model Runner V2 maps one row of logits per request to an adapter; a request with drafts has more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.model_executor.models.interfaces_base import VllmModel
from vllm.v1.worker.gpu.input_batch import InputBatch


class LogitsAdapters:
    """The adapter of every row of logits, if the target's LM head takes adapters."""

    def __init__(self, model: nn.Module) -> None:
        wrapped = (each for each in model.modules() if isinstance(each, LogitsProcessorWithLoRA))
        self.mappings = {id(each.punica_wrapper): each.punica_wrapper for each in wrapped}.values()

    def map_rows(self, batch: InputBatch) -> None:
        """Give each row of logits the adapter of its token, in every step.

        vLLM keeps the old mapping if the same requests come in the same order.
        """
        rows = batch.logits_indices
        for mapping in self.mappings:
            mapping._sampler_indices[: len(rows)] = mapping._token_lora_indices[rows]
            mapping.indices_len[1] = len(rows)


def embed_without_adapters(model: VllmModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the target's embedding without adapters, [n] token ids → [n, H].

    Drafters were trained on it, and their tokens are no rows of vLLM's batch.
    """
    view: Any = model
    for name, each in [*model.named_modules()]:
        if isinstance(each, VocabParallelEmbeddingWithLoRA):
            view = _with(view, name.split("."), each.base_layer)
    return view.embed_input_ids


def _with(module: nn.Module, path: list[str], leaf: nn.Module) -> nn.Module:
    """Return a copy of `module` with the leaf at `path` replaced; the rest is shared."""
    if not path:
        return leaf
    name, *rest = path
    other = copy.copy(module)
    other._modules = {**module._modules, name: _with(module.get_submodule(name), rest, leaf)}
    return other
