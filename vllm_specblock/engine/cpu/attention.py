"""Target attention on a CPU, over the cache as vLLM's own kernel packs it.

Requests without drafts (prompts, plain decode, a root alone) go to vLLM's kernel: what it gives is
what vLLM gives without us, bit for bit. Trees, and drafts in a chain, go to a kernel of ours that
reads the same cache in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import set_current_vllm_config

from vllm_specblock.triton_kernels.attention.tree_attention_batch import (
    TreeAttentionBatch,
    packing_on_cpu,
)

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import AttentionSpec

    from vllm_specblock.triton_kernels.attention.cpu_packing import Packing

PACKED = ("amx", "vec")
"""vLLM's names of the packings that `cpu_packing.py` knows, of the eight there are."""


class Scales(NamedTuple):
    """What keys and values in a cache of 8 bits are multiplied by: [] fp32 each, on the host."""

    key: torch.Tensor
    value: torch.Tensor

    def of_vllm(self) -> dict[str, float]:
        return {"k_scale": self.key.item(), "v_scale": self.value.item()}  # a host tensor each


@dataclass
class PackedCache:
    """One layer's cache, and its packing twice: as ours and as vLLM's kernel take it."""

    packing: Packing
    isa: str
    dtype: str  # vLLM's name of it
    whole: torch.Tensor  # [blocks, kv heads, block size, 2D], as vLLM's backend takes it
    keys: torch.Tensor  # [blocks, kv heads, block size, D], packed inside a block
    values: torch.Tensor  # likewise; both uint8 for a cache of 8 bits


def packed_cache(kv_cache: torch.Tensor, cache_dtype: str) -> PackedCache | None:
    """How a layer's cache [blocks, kv heads, block size, 2D] is packed; None: it is not.

    It is not where vLLM's kernel, or ours, does not know the head size or the processor, and
    without numba.

    Raises:
        NotImplementedError: a cache of 8 bits that is not: only vLLM's kernel rounds as vLLM does.
    """
    # A GPU's process has no use for that backend.
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


def plain_builder(
    spec: AttentionSpec, layer_names: list[str], config: VllmConfig, device: torch.device
) -> CPUAttentionMetadataBuilder | None:
    """Set up vLLM's own attention for steps without drafts; None: the caches are not packed."""
    from vllm.v1.attention.backends import cpu_attn

    layers = [config.compilation_config.static_forward_context[name] for name in layer_names]
    caches = [layer.impl.packed_cache(layer.kv_cache) for layer in layers]
    if any(cache is None for cache in caches):
        return None
    with set_current_vllm_config(config):
        for layer in layers:
            layer.impl.plain = layer.impl.as_in(cpu_attn.CPUAttentionBackendImpl)
        builder = cpu_attn.CPUAttentionMetadataBuilder(spec, layer_names, config, device)
    windows = {layer.impl.plain.sliding_window for layer in layers}
    builder.window_size = windows.pop() if len(windows) == 1 else -1
    builder.isa = caches[0].isa
    for layer in layers:
        layer.isa = builder.isa
    return builder


@dataclass
class CpuStep:
    """What is the same in every layer of a step, worked out by the first."""

    queries: TreeAttentionBatch
    some_causal: bool | np.bool = False
    causal_len: torch.Tensor | None = None  # [R] int32, 0 where the request has a tree
    schedules: dict[int, torch.Tensor] = field(default_factory=dict)  # of vLLM's kernel, by window

    def attend(
        self,
        cache: PackedCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor | None,
        out: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float,
        scales: Scales | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Store and attend one layer.

        Args:
            query, out: [T, heads, D].
            key, value: [T, kv heads, D].
            slots: [T] int64; None: another layer writes this cache.
            window, soft_cap: as in `TreeAttentionBatch.attend`.
            scales: of a cache of 8 bits.
            sinks: [heads] fp32.
        """
        eight: dict[str, Any] = {}
        if scales is not None:
            eight = {"kv_cache_dtype": cache.dtype, **scales.of_vllm()}
        if slots is not None:
            ops.cpu_attn_reshape_and_cache(
                key, value, cache.keys, cache.values, slots, cache.isa, **eight
            )
        self.queries.attend(
            query,
            cache.keys,
            scale,
            out,
            window=window,
            soft_cap=soft_cap,
            packing=cache.packing,
            causal_elsewhere=True,
            key_scale=None if scales is None else scales.key,
            value_scale=None if scales is None else scales.value,
            sinks=sinks,
        )
        last = -1 if window is None else window
        self.attend_causal(cache, query, out, scale, last, soft_cap, sinks, **eight)

    def attend_causal(
        self,
        cache: PackedCache,
        query: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int = -1,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        **eight: Any,
    ) -> None:
        """The rows that see all up to their own, by vLLM's kernel; the others stay as they are.

        eight: for a cache of 8 bits, what vLLM's kernel wants to know of it.
        """
        queries = self.queries
        if self.causal_len is None:
            causal = queries.causal()
            self.some_causal = causal.any()
            # vLLM's kernel passes over a request of no entries.
            self.causal_len = queries.seq_len[: len(causal)] * torch.from_numpy(causal)
        if not self.some_causal:
            return
        if window not in self.schedules:
            self.schedules[window] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(self.causal_len),
                num_heads=query.shape[1],
                num_kv_heads=cache.keys.shape[1],
                head_dim=query.shape[2],
                seq_lens=self.causal_len,
                dtype=query.dtype,
                query_start_loc=queries.query_start,
                causal=True,
                sliding_window_size=window,
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
            seq_lens=self.causal_len,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=window,
            block_table=queries.block_table,
            softcap=soft_cap,
            scheduler_metadata=self.schedules[window],
            s_aux=sinks,
            **eight,
        )
