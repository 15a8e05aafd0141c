"""Config class and architecture of our checkpoints for vLLM's registries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SpecBlockHFConfig(EAGLEConfig):
    """An EAGLEConfig that wraps nothing: vLLM would wrap and rename any other "eagle3" config."""

    model_type = "specblock"

    def __init__(self, **kwargs: Any) -> None:
        self.model = None
        self.truncated_vocab_size = None
        PreTrainedConfig.__init__(self, **kwargs)


class SpecBlockForDrafting(nn.Module):
    """Satisfies vLLM's inspection of a text model; never built."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        raise NotImplementedError(
            "A SpecBlock drafter is not a model of its own: name it in speculative_config, "
            'e.g. {"method": "specblock", "model": DRAFTER}.'
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
