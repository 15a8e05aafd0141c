"""The drafter's attention layers in vLLM's paged KV cache."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout


class DraftAttentionLayer(nn.Module, AttentionLayerBase):
    """One drafter layer in the eyes of vLLM's cache manager: K entries for every token.

    It shares the target's block table: the same blocks, a page K times as deep. Entry
    slot · K + k holds position k of the row at `slot`.
    """

    def __init__(
        self, vllm_config: VllmConfig, name: str, num_kv_heads: int, head_dim: int, block_size: int
    ) -> None:
        super().__init__()
        self.num_heads = num_kv_heads
        self.head_dim = head_dim
        self.entries_per_token = block_size
        self.dtype = vllm_config.model_config.dtype
        self.kv_cache = torch.tensor([])
        context = vllm_config.compilation_config.static_forward_context
        if name in context:
            raise ValueError(f"There is a layer of the name {name!r} already.")
        context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return DraftAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
            tokens_per_state=Fraction(1, self.entries_per_token),
        )


class _NoMetadataBuilder(AttentionMetadataBuilder[None]):
    """The drafter builds its own visibility: this one only keeps full CUDA graphs possible."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> None:
        return None


class DraftAttentionBackend(AttentionBackend):
    """Names the drafter's cache layout to vLLM; nothing is computed through it."""

    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @staticmethod
    def get_name() -> str:
        return "SPECBLOCK_DRAFTER"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        raise NotImplementedError("The drafter attends by itself.")

    @staticmethod
    def get_builder_cls() -> type[_NoMetadataBuilder]:
        return _NoMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)
