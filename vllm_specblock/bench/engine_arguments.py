"""Arguments of all engines of a benchmark, small enough to run side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_specblock.bench.config import BenchConfig, BenchError

BLOCK = 128
"""Maximum tokens of a cache block: platforms differ."""


def cache_bytes(config: Any, length: int, batch: int, dtype_bytes: int, spare: int = 64) -> int:
    """Return the KV cache for all requests, and a quarter more for drafters and draft slots.

    Args:
        config: the target's transformers config.
        length: maximum tokens of a request.
        spare: additional blocks.
    """
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    blocks = batch * (-(-length // BLOCK) + 2) + spare
    # A SpecBlock drafter keeps K = 4 entries per token in each of its two layers.
    return int(
        1.25 * blocks * BLOCK * size * heads * 2 * dtype_bytes * (config.num_hidden_layers + 8)
    )


def shared_arguments(
    target: Path, config: Any, dtype: str, length: int, batch: int
) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM` for engines that take turns."""
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


def common_arguments(config: BenchConfig, length: int) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM` for every method.

    Args:
        length: tokens of the longest chat.

    Raises:
        BenchError: it is longer than the target allows.
    """
    from transformers import AutoConfig

    target = AutoConfig.from_pretrained(config.target).get_text_config()
    most = getattr(target, "max_position_embeddings", None) or length
    wanted = config.max_model_len or length
    if wanted > most or length > wanted:
        raise BenchError(
            f"The longest chat may take {length} tokens, but there is room for "
            f"{min(most, wanted)}: lower --max-new-tokens or drop long questions."
        )
    shared = shared_arguments(config.target, target, config.dtype, wanted, config.batch)
    return shared | config.engine
