"""Tree attention on a CPU, over the cache as vLLM's own kernel packs it.

Requests without drafts run vLLM's kernel, bit for bit. Trees and chains of drafts run our kernel,
which reads the same cache in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata

from vllm_specblock.engine.attention import (
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
"""vLLM's names of the packings that `cpu_packing.py` supports."""


@dataclass
class PackedCache:
    """One layer's cache, and its packing for our kernel and for vLLM's."""

    packing: Packing
    isa: str
    whole: Tensor  # [blocks, kv heads, block size, 2D], as vLLM's backend takes it
    keys: Tensor  # [blocks, kv heads, block size, D], packed inside a block
    values: Tensor  # likewise


def packed_cache(kv_cache: Tensor, cache_dtype: str) -> PackedCache | None:
    """Return how a layer's cache [blocks, kv heads, block size, 2D] is packed.

    None: not packed, since vLLM's kernel or ours does not support the head size or the processor,
    or numba is missing.

    Raises:
        NotImplementedError: an unpacked 8-bit cache: only vLLM's kernel rounds as vLLM does.
    """
    from vllm.v1.attention.backends import cpu_attn

    blocks, kv_heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    sizes = cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
    fp8 = cache_dtype.startswith("fp8")  # of these, layers take e4m3 only
    packing = None
    if (fp8 or cache_dtype == "auto") and block_size % 32 == 0 and head_dim in sizes:
        isa = cpu_attn._get_attn_isa(kv_cache.dtype, block_size, head_dim, cache_dtype)
        if fp8 and isa == "amx":  # which our kernel cannot read in 8 bits
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
        torch.cpu._init_amx()  # requests the tile registers from Linux; vLLM's kernel does not
    strides = kv_cache.stride(0), packing.head_stride, width, 1
    whole = kv_cache.as_strided(kv_cache.shape, strides)
    halves = whole.view(blocks, kv_heads, 2 * block_size, head_dim).chunk(2, dim=2)
    return PackedCache(packing, isa, whole, *halves)


@dataclass
class PackedMetadata(TreeAttentionMetadata):
    """TreeAttentionMetadata, and vLLM's own for causal rows."""

    # Requests with a tree have length 0, so the kernel skips them; None: all have one.
    plain: CPUAttentionMetadata | None = None


class PackedMetadataBuilder(TreeAttentionMetadataBuilder):
    """TreeAttentionMetadataBuilder that leaves steps without drafts to vLLM's own builder."""

    @cached_property
    def plain(self) -> CPUAttentionMetadataBuilder | None:
        """vLLM's own builder; None: the caches are not packed. Call after caches are bound."""
        from vllm.v1.attention.backends import cpu_attn

        config = self.vllm_config
        layers = [config.compilation_config.static_forward_context[n] for n in self.layer_names]
        caches = [layer.impl.packed_cache(layer.kv_cache) for layer in layers]
        if any(cache is None for cache in caches):
            return None
        with set_current_vllm_config(config):
            for layer, cache in zip(layers, caches):
                impl, layer.isa = layer.impl, cache.isa
                sizes = impl.num_heads, impl.head_size, impl.scale, impl.num_kv_heads
                given = *sizes, None, impl.window, impl.cache_dtype, impl.soft_cap
                impl.plain = cpu_attn.CPUAttentionBackendImpl(*given, sinks=impl.sinks)
            builder = cpu_attn.CPUAttentionMetadataBuilder(
                self.kv_cache_spec, self.layer_names, config, self.device
            )
        windows = {layer.impl.plain.sliding_window for layer in layers}
        builder.window_size = windows.pop() if len(windows) == 1 else -1
        builder.isa = layers[0].isa
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
        batch, plain = common_attn_metadata, self.plain
        if self.tree_mask.num_trees == 0 and plain is not None:
            return plain.build(common_prefix_len, batch, fast_build)
        metadata = PackedMetadata(**vars(super().build(common_prefix_len, batch, fast_build)))
        if plain is not None and metadata.queries is not None:
            causal = metadata.queries.causal()
            if causal.any():
                batch = batch.replace(seq_lens=metadata.queries.seq_len * torch.from_numpy(causal))
                metadata.plain = plain.build(common_prefix_len, batch, fast_build)
        return metadata


class PackedAttentionBackend(TreeAttentionBackend):
    """Tree attention on a CPU, registered as vLLM's CUSTOM backend there."""

    get_impl_cls = staticmethod(lambda: PackedAttentionImpl)
    get_builder_cls = staticmethod(lambda: PackedMetadataBuilder)


class PackedAttentionImpl(TreeAttentionImpl):
    """Tree attention of one layer over a packed cache."""

    plain: CPUAttentionBackendImpl | None = None  # vLLM's own, for causal rows
    packed: PackedCache | None = None
    packed_at = 0  # address of the cache in `packed`

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
        if slots is not None:
            scales = layer._k_scale_float, layer._v_scale_float
            ops.cpu_attn_reshape_and_cache(
                key, value, cache.keys, cache.values, slots, cache.isa, *scales, self.cache_dtype
            )
        key_scale, value_scale = (layer._k_scale, layer._v_scale) if self.fp8 else (None, None)
        queries.attend(
            query,
            cache.keys,
            self.scale,
            out,
            window=self.window,
            soft_cap=self.soft_cap,
            packing=cache.packing,
            causal_elsewhere=metadata.plain is not None,
            key_scale=key_scale,
            value_scale=value_scale,
            # Cast in every step, since weights may be updated in place.
            sinks=None if self.sinks is None else self.sinks.float(),
        )
        if metadata.plain is not None:
            assert self.plain is not None  # set by `PackedMetadataBuilder.plain`
            self.plain.forward(layer, query, key, value, cache.whole, metadata.plain, out)
