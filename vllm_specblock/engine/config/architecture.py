"""The name under which vLLM's model registry knows our drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PUBLISHED = ("LlamaForCausalLMSpecBlock", "LlamaForCausalLMSpecBlockShift")

DRAFT_ARCHITECTURES = frozenset(
    {
        "SpecBlockDrafter",
        *_PUBLISHED,
        # vLLM prefixes the architecture of a config it does not know to be a drafter's.
        *(f"Eagle3{name}" for name in _PUBLISHED),
    }
)
"""Architectures in a checkpoint's config that mean "a SpecBlock drafter"."""


class SpecBlockForDrafting(nn.Module):
    """Satisfies vLLM's inspection of a text model; never built.

    The drafter itself is plain torch (`drafters/specblock/model.py`) and is loaded by
    `engine/runner/drafter_loader.py`.
    """

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
