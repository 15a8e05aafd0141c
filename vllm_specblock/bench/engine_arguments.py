"""Arguments of all engines of a benchmark, small enough to run side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLOCK = 128
"""Maximum tokens of a cache block: platforms differ."""


def cache_bytes(config: Any, length: int, batch: int, dtype_bytes: int, spare: int = 64) -> int:
    """Return the KV cache for all requests, and a quarter more for drafters and draft slots.

    Args:
        config: the target's transformers config.
        length: maximum tokens of a request.
        spare: additional blocks.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    blocks = batch * (-(-length // BLOCK) + 2) + spare
    # A SpecBlock drafter keeps K = 4 entries per token in each of its two layers.
    layers = config.num_hidden_layers + 8
    entry = size * config.num_key_value_heads * 2 * dtype_bytes
    return int(1.25 * blocks * BLOCK * layers * entry)


def shared_arguments(target: Path, dtype: str, length: int, batch: int) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM` for engines that take turns.

    `max_model_len` is `length`, or what the target allows.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target).get_text_config()
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    size = 4 if dtype in ("float32", "float", "auto") else 2
    return {
        "model": str(target),
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": batch,
        "enable_prefix_caching": False,  # a second round would skip its prompts
        "disable_log_stats": False,  # the counters that τ is read from
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": cache_bytes(config, length, batch, size, spare=8),
        # vLLM wants this share of a GPU free; many engines use one.
        "gpu_memory_utilization": 0.05,
    }
