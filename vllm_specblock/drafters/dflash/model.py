"""The DFlash network: Qwen3 layers over blocks of masks (arXiv 2602.06036).

The target's states enter only as keys and values of every layer, by the block's own projections.
Parameter names are those of the authors' checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.checkpoint_files import CheckpointReader, Tensors
from vllm_specblock.drafters.common.layers import Attend, DecoderLayer, DraftLM, RMSNorm
from vllm_specblock.drafters.common.rope import Rotary, rewritten
from vllm_specblock.drafters.dflash.config import DFlashShape, from_json


class DFlashModel(DraftLM):
    """Feature fusion, the layers, and the target's LM head, by `share_head`."""

    wants_head = True

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self.config = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(shape.layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.rotary = Rotary(shape, shape.rotary_dim)

    def share_head(self, weight: Tensor) -> None:
        super().share_head(weight)
        # It names tokens as the target does.
        self.d2t = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)

    def context(self, features: Tensor, position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys, with their RoPE, and values of committed tokens.

        features [T, n·H], the target's states side by side, low layers first; position [T] int64
        -> [T, kv heads, D] each.
        """
        fused = self.hidden_norm(self.fc(features.to(self.dtype)))
        rope = self.rotary(position, self.dtype)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer.self_attn.key_value(fused, rope)

    def forward(self, embedding: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Run the layers over blocks: embedding [n, H] of roots and masks, position [n] int64.

        Returns:
            [n, H], after the last layer.
        """
        rope, state = self.rotary(position, self.dtype), embedding.to(self.dtype)
        for index, layer in enumerate(self.layers):
            state = layer(index, state, rope, attend)
        return state


def _named(found: Tensors, config: DFlashShape, directory: Path) -> Tensors:
    return {name.removeprefix("model."): entry for name, entry in found.items()}


FILES = CheckpointReader(from_json, lambda config, names: DFlashModel(config), _named, rewritten)
"""Reads checkpoints, which hold neither an embedding nor an LM head."""
