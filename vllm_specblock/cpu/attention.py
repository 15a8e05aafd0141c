"""Tree attention on a CPU, over the cache as vLLM's own kernel packs it.

Requests without drafts go to vLLM's kernel and get its bits. Trees, and drafts in a chain, go to a
kernel of ours that reads the same cache in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata

from vllm_specblock.engine.attention.backend import (
    TreeAttentionBackend,
    TreeAttentionImpl,
    TreeAttentionMetadata,
    TreeAttentionMetadataBuilder,
)
from vllm_specblock.triton_kernels.attention.tree_attention_batch import packing_on_cpu

if TYPE_CHECKING:
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackendImpl,
        CPUAttentionMetadata,
        CPUAttentionMetadataBuilder,
    )

    from vllm_specblock.triton_kernels.attention.cpu_packing import Packing

PACKED = ("amx", "vec")
"""vLLM's names of the packings that `cpu_packing.py` knows, of the eight there are."""


@dataclass
class PackedCache:
    """One layer's cache, and its packing twice: as ours and as vLLM's kernel take it."""

    packing: Packing
    isa: str
    dtype: str  # vLLM's name of it
    whole: Tensor  # [blocks, kv heads, block size, 2D], as vLLM's backend takes it
    keys: Tensor  # [blocks, kv heads, block size, D], packed inside a block
    values: Tensor  # likewise; both uint8 for a cache of 8 bits


def packed_cache(kv_cache: Tensor, cache_dtype: str) -> PackedCache | None:
    """Return how a layer's cache [blocks, kv heads, block size, 2D] is packed.

    None: it is not, since vLLM's kernel or ours does not support the head size or the processor,
    or numba is missing.

    Raises:
        NotImplementedError: a cache of 8 bits that is not: only vLLM's kernel rounds as vLLM does.
    """
    from vllm.v1.attention.backends import cpu_attn

    blocks, kv_heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    sizes = cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
    fp8 = cache_dtype.startswith("fp8")  # of these, layers take e4m3 only
    packing = None
    if (fp8 or cache_dtype == "auto") and block_size % 32 == 0 and head_dim in sizes:
        isa = cpu_attn._get_attn_isa(kv_cache.dtype, block_size, head_dim, cache_dtype)
        if fp8 and isa == "amx":  # which ours cannot read in 8 bits
            isa = "vec"
        entries = kv_cache.view(torch.float8_e4m3fn) if fp8 else kv_cache
        packing = packing_on_cpu(entries, isa == "amx") if isa in PACKED else None
    if packing is None:
        if fp8:
            raise NotImplementedError(
                "SpecBlock reads an fp8 KV cache on a CPU as vLLM packs it for AVX-512, in blocks "
                "of a multiple of 32 tokens, and with numba: drop kv_cache_dtype."
            )
        return None
    if isa == "amx":
        torch.cpu._init_amx()  # asks the kernel for the tile registers; vLLM's kernel does not
    strides = kv_cache.stride(0), packing.head_stride, width, 1
    whole = kv_cache.as_strided(kv_cache.shape, strides)
    halves = whole.view(blocks, kv_heads, 2 * block_size, head_dim).chunk(2, dim=2)
    return PackedCache(packing, isa, cache_dtype, whole, *halves)


@dataclass
class PackedMetadata(TreeAttentionMetadata):
    """TreeAttentionMetadata, and what vLLM's kernel reads of the rows that see all up to theirs.

    Attributes:
        schedules: of the kernel, by window.
    """

    schedules: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def causal_len(self) -> Tensor | None:
        """[R] int32, 0 where the request has a tree: the kernel skips it; None: all have one."""
        assert self.queries is not None
        causal = self.queries.causal()
        if not causal.any():
            return None
        return self.queries.seq_len[: len(causal)] * torch.from_numpy(causal)

    def attend_causal(
        self,
        cache: PackedCache,
        query: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float,
        sinks: Tensor | None,
        **of_vllm: Any,
    ) -> None:
        """Attend the causal rows by vLLM's kernel; the others stay as they are.

        Args:
            of_vllm: the kernel's arguments for a cache of 8 bits.
        """
        queries, lengths = self.queries, self.causal_len
        if queries is None or lengths is None:
            return
        last = -1 if window is None else window
        if last not in self.schedules:
            self.schedules[last] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(lengths),
                num_heads=query.shape[1],
                num_kv_heads=cache.keys.shape[1],
                head_dim=query.shape[2],
                seq_lens=lengths,
                dtype=query.dtype,
                query_start_loc=queries.query_start,
                causal=True,
                sliding_window_size=last,
                isa=cache.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                kv_cache_dtype=cache.dtype,
            )
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=cache.keys,
            value_cache=cache.values,
            output=out,
            query_start_loc=queries.query_start,
            seq_lens=lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=last,
            block_table=queries.block_table,
            softcap=soft_cap,
            scheduler_metadata=self.schedules[last],
            s_aux=sinks,
            **of_vllm,
        )


class PackedMetadataBuilder(TreeAttentionMetadataBuilder):
    """TreeAttentionMetadataBuilder that leaves steps without drafts to vLLM's own builder."""

    @cached_property
    def plain(self) -> CPUAttentionMetadataBuilder | None:
        """vLLM's own builder; None: the caches are not packed. Not before caches are bound."""
        from vllm.v1.attention.backends import cpu_attn

        config = self.vllm_config
        layers = [config.compilation_config.static_forward_context[n] for n in self.layer_names]
        caches = [layer.impl.packed_cache(layer.kv_cache) for layer in layers]
        if any(cache is None for cache in caches):
            return None
        with set_current_vllm_config(config):
            for layer in layers:
                layer.impl.plain = layer.impl.as_in(cpu_attn.CPUAttentionBackendImpl)
            builder = cpu_attn.CPUAttentionMetadataBuilder(
                self.kv_cache_spec, self.layer_names, config, self.device
            )
        windows = {layer.impl.plain.sliding_window for layer in layers}
        builder.window_size = windows.pop() if len(windows) == 1 else -1
        builder.isa = caches[0].isa
        for layer in layers:
            layer.isa = builder.isa
        return builder

    @property
    def needs_mask(self) -> bool:
        return super().needs_mask and self.plain is None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        given = common_prefix_len, common_attn_metadata, fast_build
        if self.tree_mask.num_trees == 0 and self.plain is not None:
            return self.plain.build(*given)
        return PackedMetadata(**vars(super().build(*given)))


class PackedAttentionBackend(TreeAttentionBackend):
    """Tree attention on a CPU, registered as vLLM's CUSTOM backend there."""

    @staticmethod
    def get_impl_cls() -> type[PackedAttentionImpl]:
        return PackedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PackedMetadataBuilder]:
        return PackedMetadataBuilder


class PackedAttentionImpl(TreeAttentionImpl):
    """Tree attention of one layer over a packed cache.

    Attributes:
        plain: vLLM's own implementation, for rows that see all up to their own.
    """

    plain: CPUAttentionBackendImpl | None = None
    packed: PackedCache | None = None
    packed_at = 0  # address of the cache in `packed`

    def as_in(self, kind: type[CPUAttentionBackendImpl]) -> CPUAttentionBackendImpl:
        """Return the same layer in another implementation."""
        return kind(
            self.num_heads,
            self.head_size,
            self.scale,
            self.num_kv_heads,
            None,
            self.window,
            self.cache_dtype,
            self.soft_cap,
            sinks=self.sinks,
        )

    def packed_cache(self, kv_cache: Tensor) -> PackedCache | None:
        """Return the packed cache; None: it is not packed."""
        # vLLM may profile with a small cache first.
        if self.packed_at != kv_cache.data_ptr():
            self.packed = packed_cache(kv_cache, self.cache_dtype)
            self.packed_at = kv_cache.data_ptr()
        return self.packed

    def packing(self, kv_cache: Tensor) -> Packing | None:
        packed = self.packed_cache(kv_cache)
        return None if packed is None else packed.packing

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TreeAttentionMetadata | CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None or isinstance(attn_metadata, TreeAttentionMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        plain, cache = self.plain, self.packed_cache(kv_cache)
        assert plain is not None and cache is not None  # set by `PackedMetadataBuilder.plain`
        if not self.shares_cache and key is not None and key.numel():
            slots = attn_metadata.slot_mapping
            plain.do_kv_cache_update(layer, key, value, cache.whole, slots)
        return plain.forward(layer, query, key, value, cache.whole, attn_metadata, output)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slots: Tensor | None,
        metadata: TreeAttentionMetadata,
        out: Tensor,
    ) -> None:
        cache, queries = self.packed_cache(kv_cache), metadata.queries
        if cache is None or queries is None or not isinstance(metadata, PackedMetadata):
            return super().attend(layer, query, key, value, kv_cache, slots, metadata, out)
        of_vllm: dict[str, Any] = {}
        key_scale, value_scale = (layer._k_scale, layer._v_scale) if self.fp8 else (None, None)
        if key_scale is not None and value_scale is not None:
            numbers = {"k_scale": key_scale.item(), "v_scale": value_scale.item()}  # host tensors
            of_vllm = {"kv_cache_dtype": cache.dtype, **numbers}
        # Cast in every step: weights may be updated in place.
        sinks = None if self.sinks is None else self.sinks.float()
        if slots is not None:
            ops.cpu_attn_reshape_and_cache(
                key, value, cache.keys, cache.values, slots, cache.isa, **of_vllm
            )
        queries.attend(
            query,
            cache.keys,
            self.scale,
            out,
            window=self.window,
            soft_cap=self.soft_cap,
            packing=cache.packing,
            causal_elsewhere=True,
            key_scale=key_scale,
            value_scale=value_scale,
            sinks=sinks,
        )
        metadata.attend_causal(
            cache, query, out, self.scale, self.window, self.soft_cap, sinks, **of_vllm
        )
