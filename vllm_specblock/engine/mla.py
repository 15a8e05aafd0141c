"""vLLM attention backend for draft trees in multi-head latent attention (DeepSeek, Kimi, GLM).

Prompts run vLLM's own prefill. Trees and single tokens take its absorbed form: one KV head, whose
values are the beginning of its keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata

from vllm_specblock.engine.attention import ReadsTreeMask, TreeAttentionImpl
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch


class TreeMLABuilder(ReadsTreeMask, MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's builder, with a TreeAttentionBatch as `decode`."""

    query_len_support = QueryLenSupport.VARLEN

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLACommonMetadata:
        # Prompts take the prefill however short they are, as without drafts. vLLM does so with
        # context parallelism, which we refuse otherwise. Full graphs hold decode steps only.
        self.use_pcp = self.tree_mask.num_trees is not None
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.num_decodes:
            metadata.decode = self.queries_of(common_attn_metadata, metadata.num_decodes)
        return metadata


class TreeMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """Absorbed attention of one layer: tree attention with one KV head."""

    # As `TreeAttentionImpl` has them.
    window, soft_cap, sinks, fp8 = None, 0.0, None, False
    packing, typed = TreeAttentionImpl.packing, TreeAttentionImpl.typed

    @property
    def value_size(self) -> int:
        return int(self.kv_lora_rank)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],  # [T, heads, rank], [T, heads, rope]
        kv_c_and_k_pe_cache: torch.Tensor,  # [blocks, block size, rank + rope]
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        queries: TreeAttentionBatch = attn_metadata.decode
        queries.attend(query, kv_c_and_k_pe_cache[:, None], self.scale, out)
        return out, None


class TreeMLABackend(MLACommonBackend):
    """Registered as vLLM's CUSTOM backend for targets with multi-head latent attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    get_name = staticmethod(lambda: "CUSTOM")
    get_impl_cls = staticmethod(lambda: TreeMLAImpl)
    get_builder_cls = staticmethod(lambda: TreeMLABuilder)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any
