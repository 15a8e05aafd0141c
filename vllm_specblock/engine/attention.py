"""vLLM attention backend for draft trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from vllm_specblock.commit import store_kv
from vllm_specblock.options import OptionError, TargetError
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch
from vllm_specblock.verify.tree_mask import TreeMask

if TYPE_CHECKING:
    from vllm_specblock.triton_kernels.attention.cpu_packing import Packing


@cache
def flash_attention(head_size: int) -> partial[Any]:
    """Return vLLM's FlashAttention, in the version for this GPU."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    return partial(flash_attn_varlen_func, fa_version=get_flash_attn_version(head_size=head_size))


def flash_takes(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether FlashAttention supports layers of this kind on this GPU."""
    if device.type != "cuda" or spec.dtype == torch.float32 or spec.head_size % 8:
        return False
    version = flash_attention(spec.head_size).keywords["fa_version"]
    return version is not None and (spec.head_size <= 256 or version == 4)


def after_trees(batch: CommonAttentionMetadata, num_trees: int) -> CommonAttentionMetadata | None:
    """Return the metadata of the requests after the first `num_trees`; None: there are none."""
    if num_trees >= batch.num_reqs:
        return None
    requests = slice(num_trees, batch.num_reqs)
    start = int(batch.query_start_loc_cpu[num_trees])  # a host tensor
    rows = slice(start, batch.num_actual_tokens)
    (rest,) = split_attn_metadata([UBatchSlice(requests, rows)], batch)
    prefilling = batch.is_prefilling
    return rest.replace(
        is_prefilling=None if prefilling is None else prefilling[requests],
        max_seq_len=int(rest.seq_lens_cpu_upper_bound.max()),  # a host tensor
    )


@dataclass
class TreeAttentionMetadata:
    """Tree attention metadata of one batch."""

    num_rows: int
    slot_mapping: torch.Tensor  # [T] int64
    queries: TreeAttentionBatch | None  # None: all requests are in `causal`
    # The last requests of a batch, which have no trees: prompts, and requests without drafts.
    # Eager batches only: in a graph any row may be a tree's.
    causal: CommonAttentionMetadata | None = None


class ReadsTreeMask:
    """A metadata builder that reads `tree_mask`, which `TreeModelState` sets before every build."""

    tree_mask: TreeMask
    # Whether an eager step without drafts needs the tree mask, too.
    needs_mask: ClassVar[Any] = True

    # All metadata tensors are persistent, and the grid depends on host values only.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int:
        # The kernel takes any mix of lengths.
        return vllm_config.num_speculative_tokens + 1

    def queries_of(self, batch: CommonAttentionMetadata, count: int) -> TreeAttentionBatch:
        """Return the queries of the first `count` requests."""
        mask = self.tree_mask
        starts = batch.query_start_loc_cpu
        if mask.adaptive and batch.query_start_loc.device.type == "cpu":
            starts = batch.query_start_loc
        max_seq_len, max_query_len = batch.max_seq_len, batch.max_query_len
        if count < batch.num_reqs:
            # Trees only; with `adaptive` their lengths are known on the device only.
            max_seq_len = int(batch.seq_lens_cpu_upper_bound[:count].max())  # a host tensor
            max_query_len = mask.num_nodes + 1
        return TreeAttentionBatch(
            batch.block_table_tensor[:count],
            batch.query_start_loc[: count + 1],
            starts[: count + 1].tolist(),  # a host tensor
            batch.seq_lens[:count],
            max_seq_len,
            mask.prefix_len,
            mask.mask_words,
            mask.tree_start,
            max_query_len,
            unknown_up_to=mask.num_nodes + 1 if mask.adaptive else 0,
        )


class TreeAttentionMetadataBuilder(ReadsTreeMask, AttentionMetadataBuilder[TreeAttentionMetadata]):
    """Builds metadata of tree attention."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        layers = self.vllm_config.compilation_config.static_forward_context
        # FlashAttention supports sinks on some GPUs only.
        sinks = any(layers[name].impl.sinks is not None for name in self.layer_names)
        self.by_flash = not sinks and flash_takes(self.kv_cache_spec, self.device)

    @property
    def needs_mask(self) -> bool:
        return not self.by_flash

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        batch, tree_mask, causal = common_attn_metadata, self.tree_mask, None
        if self.by_flash and tree_mask.num_trees is not None:
            causal = after_trees(batch, tree_mask.num_trees)
        count = batch.num_reqs if causal is None else tree_mask.num_trees
        queries = self.queries_of(batch, count) if count else None
        num_rows = batch.num_actual_tokens
        return TreeAttentionMetadata(num_rows, batch.slot_mapping[:num_rows], queries, causal)


class TreeAttentionBackend(AttentionBackend):
    """Tree attention, registered as vLLM's CUSTOM backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    get_name = staticmethod(lambda: "CUSTOM")
    get_impl_cls = staticmethod(lambda: TreeAttentionImpl)
    get_builder_cls = staticmethod(lambda: TreeAttentionMetadataBuilder)
    # Text-only requests have no multimodal prefix.
    supports_sliding_window = supports_sink = supports_mm_prefix = classmethod(lambda cls: True)
    # A slot of a layer is one contiguous row to copy.
    supported_kv_cache_layouts = classmethod(lambda cls: (KVCacheLayout.LBNHC,))


class TreeAttentionImpl(AttentionImpl):
    """Tree attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        # vLLM refuses other types of layers and caches by the backend.
        if alibi_slopes is not None or others:
            raise TargetError(f"attention with {', '.join(others)}" if others else "ALiBi")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.value_size = num_kv_heads, head_size
        self.window, self.soft_cap = sliding_window, logits_soft_cap or 0.0
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.sinks = sinks  # [heads], a parameter of the model
        self.cache_dtype, self.fp8 = kv_cache_dtype, kv_cache_dtype.startswith("fp8")
        if self.fp8 and current_platform.is_cuda():
            self.supports_quant_query_input = True  # vLLM then quantises the queries to e4m3
            if flash_attention(head_size).keywords["fa_version"] != 3 or head_size % 16:
                raise OptionError(
                    f"Head size {head_size} has no fp8 KV cache: set kv_cache_dtype to 'bfloat16'."
                )

    def packing(self, kv_cache: torch.Tensor) -> Packing | None:
        """Return the layout of a packed cache; None: it is not packed."""
        return None

    def typed(
        self, kv_cache: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the cache in its own dtype, where vLLM has uint8 for fp8, and its scales."""
        if not self.fp8:
            return kv_cache, {}
        scales = {"key_scale": layer._k_scale, "value_scale": layer._v_scale}
        if self.supports_quant_query_input:
            scales["query_scale"] = layer._q_scale
        return kv_cache.view(torch.float8_e4m3fn), scales

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,  # [T, heads, head size]; e4m3 on a GPU with an fp8 cache
        key: torch.Tensor,  # [T, kv heads, head size]
        value: torch.Tensor,
        kv_cache: torch.Tensor,  # [blocks, kv heads, block size, 2 × head size]; uint8 for fp8
        attn_metadata: TreeAttentionMetadata | None,
        output: torch.Tensor,  # [T, heads, head size]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # profiling
            return output.fill_(0)
        # Stored by the layer that shares its cache, or by an earlier call of this one (IQuest).
        stored = self.shares_cache or key is None or not key.numel()
        slots = None if stored else attn_metadata.slot_mapping
        num_rows, whole = attn_metadata.num_rows, output
        if query.shape[0] > num_rows:  # padding; slice only if needed
            query, output = query[:num_rows], output[:num_rows]
            if slots is not None:
                key, value = key[:num_rows], value[:num_rows]
        self.attend(layer, query, key, value, kv_cache, slots, attn_metadata, output)
        return whole

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor | None,
        metadata: TreeAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Store and attend rows without padding; arguments as in `forward`."""
        kv_cache, scales = self.typed(kv_cache, layer)
        if slots is not None:
            stored = scales.get("key_scale"), scales.get("value_scale")
            store_kv(kv_cache, slots, key, value, *stored)
        queries, causal = metadata.queries, metadata.causal
        if causal is not None:
            trees = metadata.num_rows - causal.num_actual_tokens
            # As vLLM's backend does, for equal bits; it takes [blocks, block size, kv heads, D].
            keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
            descales = causal.num_reqs, self.num_kv_heads
            flash_attention(self.head_size)(
                query[trees:],
                canonicalize_singleton_dim_strides(keys),
                canonicalize_singleton_dim_strides(values),
                out=out[trees:],
                max_seqlen_q=causal.max_query_len,
                cu_seqlens_q=causal.query_start_loc,
                max_seqlen_k=causal.max_seq_len,
                seqused_k=causal.seq_lens,
                softmax_scale=self.scale,
                causal=True,
                window_size=[-1, -1] if self.window is None else [self.window - 1, 0],
                softcap=self.soft_cap,
                block_table=causal.block_table_tensor,
                **{f"{name[0]}_descale": each.expand(descales) for name, each in scales.items()},
            )
            query, out = query[:trees], out[:trees]
        if queries is not None:
            scales |= {"window": self.window, "soft_cap": self.soft_cap, "sinks": self.sinks}
            queries.attend(query, kv_cache, self.scale, out, **scales)
