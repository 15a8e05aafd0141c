"""Kernel warm-up for requests of all lengths.

vLLM's own warm-up requests are short, and its dummy batches attend to nothing.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_specblock.commit.move import move_path
from vllm_specblock.engine.runner.caches import EngineCaches
from vllm_specblock.tree import words_for
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows
from vllm_specblock.triton_kernels.warm_up import compile_attention


def compile_kernels(config: VllmConfig, caches: EngineCaches, block_tables: BlockTables) -> None:
    """Launch every attention kernel of target and drafters once, if vLLM's JIT warm-up is on."""
    if not config.kernel_config.enable_jit_warmup:
        return
    block_table = block_tables.input_block_tables[caches.group]
    rows, length = config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len
    context, seen = config.compilation_config.static_forward_context, set()
    for name in caches.target_layers:
        layer = context[name]
        impl = layer.impl
        sinks = None if impl.sinks is None else impl.sinks.float()
        heads = impl.num_heads, impl.num_kv_heads, impl.head_size
        form = (*heads, impl.window, impl.soft_cap, sinks is None)
        if form in seen:
            continue
        seen.add(form)
        cache, scales = layer.kv_cache, {}
        if impl.fp8:
            cache = cache.view(torch.float8_e4m3fn)
            scales = {"key_scale": layer._k_scale, "value_scale": layer._v_scale}
        dtype = config.model_config.dtype
        query = cache.new_empty(1, impl.num_heads, impl.head_size, dtype=dtype)
        compile_attention(
            query,
            cache,
            block_table,
            words_for(config.num_speculative_tokens),
            rows,
            length,
            window=impl.window,
            soft_cap=impl.soft_cap,
            sinks=sinks,
            packing=impl.packing(cache),
            **scales,
        )
    for drafter in caches.drafters:
        drafter.warm_up(block_table, rows)
    if block_table.device.type == "cpu":
        none, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        path = torch.zeros(1, 2, dtype=torch.int64)
        accepted = AcceptedRows(none.int(), one, path, none.int())
        for _, each in caches.target:
            move_path(each, -one, accepted, 1)
