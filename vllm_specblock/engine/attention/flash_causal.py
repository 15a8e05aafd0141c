"""Causal requests by vLLM's FlashAttention: prompts, and requests without a tree.

They get the bits of vLLM's own backend. Eager batches only: in a graph any row may be a tree's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True)
class CausalRequests:
    """The last C requests of a batch, which have no trees."""

    first_row: int  # of the first request; the rows before belong to trees
    query_start: torch.Tensor  # [C+1] int32, starts at 0
    seq_len: torch.Tensor  # [C] int32, entries up to and including the last row of a request
    block_table: torch.Tensor  # [C, max blocks] int32
    max_query_len: int
    max_seq_len: int

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        window: int | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        """Attend their rows in one layer; leave the rows before theirs unchanged.

        Args as in `tree_attention`, of 16 bits; the rows are those of the whole batch.
        """
        # FlashAttention's views are [blocks, block size, kv heads, D].
        key, value = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        flash_attention(query.shape[-1])(
            query[self.first_row :],
            canonicalize_singleton_dim_strides(key),
            canonicalize_singleton_dim_strides(value),
            out=out[self.first_row :],
            max_seqlen_q=self.max_query_len,
            cu_seqlens_q=self.query_start,
            max_seqlen_k=self.max_seq_len,
            seqused_k=self.seq_len,
            softmax_scale=scale,
            causal=True,
            window_size=[-1, -1] if window is None else [window - 1, 0],
            softcap=soft_cap,
            block_table=self.block_table,
        )


@cache
def flash_attention(head_size: int) -> partial[Any]:
    """Return vLLM's FlashAttention, in the version for this GPU."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    return partial(flash_attn_varlen_func, fa_version=get_flash_attn_version(head_size=head_size))


def takes(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether FlashAttention supports layers of this kind."""
    if device.type != "cuda" or spec.dtype not in (torch.float16, torch.bfloat16):
        return False
    try:
        version = flash_attention(spec.head_size).keywords["fa_version"]
    except (ImportError, AssertionError):  # not in this build, or not for this head size
        return False
    return version is not None and spec.head_size % 8 == 0  # None: an unsupported GPU


def after_trees(batch: CommonAttentionMetadata, num_trees: int) -> CausalRequests | None:
    """Return the requests after the first `num_trees`; None: there are none."""
    if num_trees >= batch.num_reqs:
        return None
    starts = batch.query_start_loc_cpu[num_trees : batch.num_reqs + 1].tolist()  # a host tensor
    rest = slice(num_trees, batch.num_reqs)
    return CausalRequests(
        starts[0],
        batch.query_start_loc[num_trees : batch.num_reqs + 1] - starts[0],
        batch.seq_lens[rest],
        batch.block_table_tensor[rest],
        max(end - start for start, end in itertools.pairwise(starts)),
        int(batch.seq_lens_cpu_upper_bound[rest].max()),  # a host tensor
    )
