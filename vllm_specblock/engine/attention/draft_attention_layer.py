"""The drafter's attention layers in vLLM's paged KV cache."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_specblock.drafters.interface import CacheLayer


class DraftAttentionLayer(nn.Module, AttentionLayerBase):
    """One drafter layer for vLLM's cache manager, under the target's block table.

    A token has K entries: slot · K + k holds position k of the row at `slot`.
    """

    def __init__(self, vllm_config: VllmConfig, number: int, layer: CacheLayer) -> None:
        super().__init__()
        self.name, self.layer = f"specblock.layers.{number}.attn", layer
        self.dtype = vllm_config.model_config.dtype
        self.kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[self.name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return DraftAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.layer.num_kv_heads,
            head_size=self.layer.head_dim,
            dtype=self.dtype,
            tokens_per_state=Fraction(1, self.layer.entries_per_token),
        )


class DraftMetadataBuilder(CacheOnlyAttentionMetadataBuilder):
    """The drafter builds its own metadata: nothing of vLLM's prevents full CUDA graphs."""

    _cudagraph_support = AttentionCGSupport.ALWAYS


class DraftAttentionBackend(CacheOnlyAttentionBackend):
    """Names the drafter's cache layout to vLLM."""

    @staticmethod
    def get_builder_cls() -> type[DraftMetadataBuilder]:
        return DraftMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)
