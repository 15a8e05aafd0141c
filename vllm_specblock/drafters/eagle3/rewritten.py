"""Query and key projections rewritten for RoPE that turns whole heads by halves, without a factor.

A score is the same if query and key change places among their dimensions together. So where RoPE
turns the first R of D dimensions, in pairs (i, i + R/2), the rows of both projections are laid out
for pairs (i, i + D/2), of which those behind R/2 have no frequency (`Rotary`). YaRN's factor on cos
and sin goes into the rows that they turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_specblock.drafters.common.rope import attention_factor
from vllm_specblock.drafters.eagle3.config import Eagle3Shape


def rewritten(tensors: dict[str, Tensor], config: Eagle3Shape) -> dict[str, Tensor]:
    """A checkpoint's tensors, by the drafter's names, as `Eagle3Model` takes them."""
    factor, dim = attention_factor(config.rope_scaling), config.head_dim
    turned = config.rotary_dim or dim
    if factor == 1 and turned == dim:
        return tensors
    ids = torch.arange(dim)
    order = torch.cat([*(torch.cat(x) for x in zip(ids[:turned].chunk(2), ids[turned:].chunk(2)))])
    scale = torch.where(order < turned, factor, 1.0)
    out = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else name
        if part in ("q_norm", "k_norm"):
            tensor = tensor.float()[order] * scale
        elif part in ("q_proj", "k_proj"):
            heads = tensor.float().unflatten(0, (-1, dim))[:, order]
            if not config.qk_norm:  # else the norm would take it out again
                heads = heads * scale.view(-1, *[1] * (tensor.dim() - 1))
            tensor = heads.flatten(0, 1)
        out[name] = tensor
    return out
