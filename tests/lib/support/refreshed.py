"""Weights of served drafters, compared bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.drafters.common.linear import process_after_loading
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import held


@torch.inference_mode()
def values(drafter: SpecBlockModel) -> dict[str, Tensor]:
    """Copies of all tensors, as bytes."""
    return {
        name: tensor.clone().contiguous().view(-1).view(torch.uint8)
        for name, tensor in held(drafter)
    }


def served(
    model: SpecBlockModel, dtype: torch.dtype = torch.float32, quantization: str | None = None
) -> SpecBlockModel:
    return process_after_loading(model.eval().to(dtype), quantization)


def weights(model: SpecBlockModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}
