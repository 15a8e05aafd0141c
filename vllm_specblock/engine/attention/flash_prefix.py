"""Prefix by FlashAttention and tree by our kernel, merged by their log-sum-exp.

Legal only where every query of a request sees the request's whole prefix and, beyond it, nothing
but its bits: decode steps and trees. Chunks of a prompt see prefixes of different lengths, and a
sliding window begins elsewhere for every depth.

FlashAttention gets keys and values as two strided views of one cache, [blocks, block size, kv
heads, D] each. It needs the last dim to be dense (else its wrapper copies the cache) and every
other stride to be a multiple of 16 bytes, which holds for head sizes that are a multiple of 8. A
dim of size 1 may carry any stride; it is given that of a dense tensor, as vLLM's backend does.

FlashAttention chooses its number of splits by the batch: on this way a request's bits do depend on
its company.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

from vllm_specblock.triton_kernels.attention.merge_states import merge_states
from vllm_specblock.triton_kernels.attention.tree_attention_batch import TreeAttentionBatch


@dataclass(frozen=True)
class Shapes:
    """Batches for which FlashAttention was faster: all of these at once."""

    head_size: int
    min_queries: int  # query tokens of the longest request
    min_context: int  # entries, bound of the longest request
    min_requests: int


FASTER: tuple[Shapes, ...] = ()
"""Filled in from measurements only, and none has been made yet: empty, so that our kernel does
everything. `python benchmarks/kernels.py` measures both ways beside FlashAttention on a chain."""


def choose(
    queries: TreeAttentionBatch, head_size: int, all_trees: bool, window: int | None
) -> bool:
    """Whether this way is legal for the batch and was measured to be faster.

    Args:
        queries: the batch.
        head_size: D.
        all_trees: every query of the batch is the root or a node of a tree, or a plain decode
            step: its prefix_len is its request's tree_start.
        window: the layer's sliding window, in entries.
    """
    if not all_trees or window is not None:
        return False
    return any(
        shapes.head_size == head_size
        and queries.max_query_len >= shapes.min_queries
        and queries.max_seq_len >= shapes.min_context
        and len(queries.query_start) - 1 >= shapes.min_requests
        for shapes in FASTER
    )


@cache
def flash_attention(head_size: int) -> partial[Any]:
    """vLLM's FlashAttention of this GPU's version.

    Raises:
        ImportError: not on a CUDA GPU.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    return partial(flash_attn_varlen_func, fa_version=get_flash_attn_version(head_size=head_size))


def keys_and_values(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache [blocks, kv heads, block size, 2D] as FlashAttention wants it: two views of it,
    [blocks, block size, kv heads, D] each."""
    key, value = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return canonicalize_singleton_dim_strides(key), canonicalize_singleton_dim_strides(value)


def attend_prefix_and_tree(
    flash: Callable[..., Any],
    queries: TreeAttentionBatch,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one layer for a batch where `choose` allows it.

    Args:
        flash: as `flash_attention` gives it.
        queries: the batch, T query tokens; its tree_start is the length of every prefix.
        query: [T, heads, D] bf16 or fp16.
        kv_cache: [blocks, kv heads, block size, 2D] of the same dtype.
        scale: factor on the scores.
        out: [T, heads, D] to write into.
        soft_cap: as in `tree_attention`.
    """
    num_requests = len(queries.query_start) - 1
    key, value = keys_and_values(kv_cache, query.shape[-1])
    prefix, prefix_lse = flash(
        query,
        key,
        value,
        max_seqlen_q=queries.max_query_len,
        cu_seqlens_q=queries.query_start,
        max_seqlen_k=queries.max_seq_len,
        seqused_k=queries.tree_start[:num_requests],
        softmax_scale=scale,
        causal=False,
        softcap=soft_cap,
        block_table=queries.block_table,
        return_softmax_lse=True,
    )
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    queries.attend(query, kv_cache, scale, out, bits_only=True, soft_cap=soft_cap, lse=lse)
    return merge_states(prefix, prefix_lse.T, out, lse, out)
