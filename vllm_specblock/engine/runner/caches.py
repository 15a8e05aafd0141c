"""KV caches of the target and the drafters."""

from __future__ import annotations

from fractions import Fraction
from itertools import count
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_specblock.commit import move_path
from vllm_specblock.config import OptionError
from vllm_specblock.drafters.interface import CacheLayer, Drafter
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows, KVCacheSet
from vllm_specblock.triton_kernels.tree.node_bits import words_for
from vllm_specblock.triton_kernels.warm_up import compile_attention

Slots = dict[str, torch.Tensor]
"""Per layer [≥ batch rows] int64, the cache slot of each row of a batch."""


class EngineCaches:
    """Caches of target and drafters, under one block table.

    target_layers: names of the target's layers; drafter_layers: names of each drafter's layers;
    target: the target's caches by cache group and geometry; group: the drafters' cache group.
    """

    def __init__(
        self,
        config: VllmConfig,
        target_layers: list[str],
        drafters: list[Drafter],
        device: torch.device,
    ) -> None:
        self.config, self.device = config, device
        self.target_layers, self.drafters = target_layers, drafters
        self.context = config.compilation_config.static_forward_context
        # Numbers follow the target's layers, as with vLLM's own drafters.
        number = count(config.model_config.get_num_layers(config.parallel_config))
        self.drafter_layers = [
            [DraftAttentionLayer(config, next(number), layer).name for layer in each.cache_layers()]
            for each in drafters
        ]

    def bind_null(self) -> None:
        """Bind drafters to caches of one null block, until vLLM allocates the real ones."""
        model, size = self.config.model_config, self.config.cache_config.block_size
        for drafter in self.drafters:
            # With `max_model_len` "auto", vLLM lowers the limit after the drafters are built.
            drafter.max_model_len = model.max_model_len
            caches = []
            for layer in drafter.cache_layers():
                shape = 1, size * layer.entries_per_token, layer.num_kv_heads, 2 * layer.head_dim
                cache = torch.zeros(shape, dtype=model.dtype, device=self.device)
                caches.append(cache.transpose(1, 2))
            drafter.bind(caches)

    def find_groups(self, kv_cache_config: KVCacheConfig) -> None:
        """Find the cache group of every layer; OptionError if vLLM gave one no block table."""
        self.bind_null()
        # Release the caches that vLLM profiled graphs with; it allocates the real ones next.
        self.target: list[tuple[int, KVCacheSet]] = []
        groups = enumerate(kv_cache_config.kv_cache_groups)
        self.group_of = {name: i for i, group in groups for name in group.layer_names}
        self.layer_of = {i: name for name, i in self.group_of.items()}  # any layer of each group
        drafters = {self.group_of[name] for names in self.drafter_layers for name in names}
        missing = [name for name in self.target_layers if name not in self.group_of]
        if missing or len(drafters) > 1:
            given = f"{missing[0]} no block table" if missing else "drafters several block tables"
            raise OptionError(
                f"vLLM gave {given}, but SpecBlock needs exactly one: run this target without "
                "speculative_config."
            )
        self.group = min(drafters, default=self.group_of[self.target_layers[0]])

    def bind(self) -> None:
        """Bind the allocated caches to the commit and the drafters."""
        alike: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}  # a shared cache comes once
        for name in self.target_layers:
            cache, impl = _with_heads(self.context[name].kv_cache), self.context[name].impl
            form = cache.shape, cache.stride(), cache.dtype, impl.packing(cache)
            alike.setdefault((self.group_of[name], *form), {})[cache.data_ptr()] = cache
        self.target = [
            (group, KVCacheSet([*caches.values()], packing))
            for (group, *_, packing), caches in alike.items()
        ]
        for drafter, names in zip(self.drafters, self.drafter_layers):
            drafter.bind([self.context[name].kv_cache for name in names])

    def warm_up(self, block_tables: BlockTables) -> None:
        """Launch every attention kernel once: on a CPU always, on a GPU with vLLM's JIT warm-up.

        vLLM's own warm-up requests are short, and its dummy batches attend to nothing. With
        `enforce_eager` JIT warm-up is off: on a CPU the first request would wait for seconds.
        """
        config, block_table = self.config, block_tables.input_block_tables[self.group]
        on_host = block_table.device.type == "cpu"
        if not on_host and not config.kernel_config.enable_jit_warmup:
            return
        rows, forms = config.scheduler_config.max_num_batched_tokens, {}
        for layer in map(self.context.__getitem__, self.target_layers):
            impl = layer.impl
            heads = impl.num_heads, impl.num_kv_heads, impl.head_size
            forms[(*heads, impl.window, impl.soft_cap, impl.sinks is None, impl.fp8)] = layer
        for layer in forms.values():
            impl = layer.impl
            cache, scales = impl.typed(_with_heads(layer.kv_cache), layer)
            dtype = config.model_config.dtype
            asked = cache.dtype if "query_scale" in scales else dtype
            compile_attention(
                cache.new_empty(1, impl.num_heads, impl.head_size, dtype=asked),
                cache,
                block_table,
                words_for(config.num_speculative_tokens),
                rows,
                config.model_config.max_model_len,
                value_size=impl.value_size,
                out_dtype=dtype,
                window=impl.window,
                soft_cap=impl.soft_cap,
                sinks=None if impl.sinks is None else impl.sinks.float(),
                packing=impl.packing(cache),
                **scales,
            )
        for drafter in self.drafters:
            drafter.warm_up(block_table, rows)
        if on_host:
            none, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
            accepted = AcceptedRows(none.int(), one, torch.zeros(1, 2).long(), none.int())
            for _, each in self.target:
                move_path(each, -one, accepted, 1)

    def slots(self, slot_mappings: Slots, group: int | None = None) -> torch.Tensor:
        """Return the slot mapping of a cache group, [≥ batch rows] int64; None: the drafters'."""
        return slot_mappings[self.layer_of[self.group if group is None else group]]


def _with_heads(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache with the dimension of KV heads, which vLLM drops for MLA's only one."""
    return cache if cache.dim() == 4 else cache[:, None]


class DraftAttentionLayer(nn.Module, AttentionLayerBase):
    """One drafter layer for vLLM's cache manager, under the target's block table.

    A token has K entries: slot · K + k holds position k of the row at `slot`.
    """

    def __init__(self, vllm_config: VllmConfig, number: int, layer: CacheLayer) -> None:
        super().__init__()
        self.name, self.layer = f"specblock.layers.{number}.attn", layer
        self.kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[self.name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return DraftAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.layer.num_kv_heads,
            head_size=self.layer.head_dim,
            dtype=vllm_config.model_config.dtype,
            tokens_per_state=Fraction(1, self.layer.entries_per_token),
        )


class DraftMetadataBuilder(CacheOnlyAttentionMetadataBuilder):
    """Metadata builder that allows full CUDA graphs: the drafter builds its own metadata."""

    _cudagraph_support = AttentionCGSupport.ALWAYS


class DraftAttentionBackend(CacheOnlyAttentionBackend):
    """Attention backend that names the drafter's cache layout to vLLM."""

    get_builder_cls = staticmethod(lambda: DraftMetadataBuilder)
    supported_kv_cache_layouts = classmethod(lambda cls: (KVCacheLayout.LBNHC,))
