"""The torch reference of `tree_attention`, which is also what runs in production on a CPU.

In two parts: what is the same in every layer of a step, and one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F

from .paged_rows import flat_rows, row_index

# Requests with at most so many query tokens (decode steps, trees) share one padded SDPA call on
# CPU; a longer prefill chunk is worth a call of its own.
MAX_BATCHED_QUERY = 64


@dataclass
class RequestGroup:
    """G requests whose queries are padded to Q tokens and whose entries are padded to L."""

    num_requests: int  # G
    first: int  # when `tokens` is None: the group is the G·Q tokens from here on, unpadded
    tokens: torch.Tensor | None  # [G, Q] int64 token of each query slot; padding repeats a token
    used: torch.Tensor | None  # [n] int64: the slots of the flattened [G, Q] that are no padding
    used_tokens: torch.Tensor | None  # [n] int64: their tokens
    block: torch.Tensor  # [G, L] int64
    offset: torch.Tensor  # [G, L] int64
    mask: torch.Tensor  # [G, 1, Q, L] float: 0 where visible, -inf elsewhere
    rows: dict[tuple, torch.Tensor] = field(default_factory=dict)  # cache layout -> row numbers

    def gather(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The group's entries of one layer's cache -> [G, nkv, L, 2D]."""
        flat = flat_rows(kv_cache)
        if flat is None:
            return kv_cache[self.block, :, self.offset].transpose(1, 2)
        layout = (kv_cache.shape, kv_cache.stride())
        if layout not in self.rows:
            self.rows[layout] = row_index(kv_cache, self.block, self.offset, heads_dim=1).flatten()
        shape = (len(self.block), kv_cache.shape[1], self.block.shape[1], kv_cache.shape[3])
        # Several times quicker than indexing the paged view with two index tensors.
        return flat.index_select(0, self.rows[layout]).view(shape)


@dataclass
class AttentionPlan:
    """What is the same in every layer of one step."""

    groups: list[RequestGroup]
    num_tokens: int  # query_start[R]: tokens from here on belong to no request


def plan_reference(
    block_table: torch.Tensor,
    block_size: int,
    query_start_host: Sequence[int],
    seq_len_host: Sequence[int],
    prefix_len: torch.Tensor,
    words: torch.Tensor,
    window_start: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> AttentionPlan:
    """Work out once per step which cache entries each request needs and which query sees which.

    Tensors as in `tree_attention`; query_start_host (R+1 integers) and seq_len_host (R integers,
    upper bounds) are on the host as a list or a numpy array. `dtype` is the queries'.
    """
    start = [int(s) for s in query_start_host]
    query_len = [b - a for a, b in pairwise(start)]
    short = [r for r, n in enumerate(query_len) if 0 < n <= MAX_BATCHED_QUERY]
    alone = [[r] for r, n in enumerate(query_len) if n > MAX_BATCHED_QUERY]
    groups = []
    for members in ([short] if short else []) + alone:
        lens = [query_len[r] for r in members]
        seqs = [max(int(seq_len_host[r]), 1) for r in members]
        first, tokens, used, used_tokens = start[members[0]], None, None, None
        width = max(lens)
        total = start[members[-1] + 1] - first
        if total == len(members) * width and min(lens) == width:
            rows = slice(first, first + total)
            group_prefix = prefix_len[rows].view(len(members), width)
            group_words = words[rows].view(len(members), width, words.shape[1])
        else:
            slot = torch.arange(width)
            last = torch.tensor(lens)[:, None] - 1
            tokens = torch.tensor([start[r] for r in members])[:, None] + slot.minimum(last)
            # Built from host integers: the shape depends on no tensor's content.
            used = torch.tensor([g * width + i for g, n in enumerate(lens) for i in range(n)])
            used_tokens = tokens.flatten()[used]
            group_prefix, group_words = prefix_len[tokens], words[tokens]

        everyone = len(members) == len(query_len)
        which = slice(len(members)) if everyone else torch.tensor(members)
        seen = _visibility(group_prefix, group_words, window_start[which], seqs)
        # What nobody sees is not read, it may be unwritten memory or a stranger's: a masked entry
        # still takes part with weight 0, and 0 · NaN is NaN. Entry 0 stands in for it.
        own = torch.where(seen.any(1), torch.arange(seen.shape[2]), 0)
        block = block_table[which].long().gather(1, own // block_size)
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]
        groups.append(
            RequestGroup(
                len(members), first, tokens, used, used_tokens, block, own % block_size, mask
            )
        )
    return AttentionPlan(groups, start[-1])


def _visibility(
    prefix: torch.Tensor, words: torch.Tensor, window_start: torch.Tensor, seqs: list[int]
) -> torch.Tensor:
    """The rule of this module, unpacked.

    prefix [G, Q] int32, words [G, Q, W] int64, window_start [G] int32, seqs: the entries of each
    request -> [G, Q, L] bool, L = max(seqs).
    """
    entry = torch.arange(max(seqs))
    bound = torch.tensor(seqs)[:, None, None]
    prefix = prefix[..., None].clamp(max=bound)
    bits = ((words[..., None] >> torch.arange(64)) & 1).flatten(2).bool()
    column = window_start.long()[:, None, None] + torch.arange(bits.shape[-1])
    # A column may be in the prefix already: scattering must not take it away.
    bits = (bits & (column < bound)) | (column < prefix)
    # Columns past the end all land in one spare column that is cut off again.
    seen = F.pad(entry < prefix, (0, 1))
    seen.scatter_(2, column.clamp(max=len(entry)).expand_as(bits), bits)
    return seen[..., :-1]


def attend_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """One layer's attention under `plan`. query [T, nh, D], kv_cache as in `tree_attention`.

    Writes and returns out [T, nh, D].
    """
    head_size = query.shape[-1]
    for group in plan.groups:
        size = group.num_requests, group.mask.shape[2]
        kv = group.gather(kv_cache)
        if group.tokens is None:
            mine = slice(group.first, group.first + size[0] * size[1])
            rows = query[mine].unflatten(0, size)
        else:
            rows = query[group.tokens]
        # SDPA gives zeros for a query that sees nothing (all of its mask -inf).
        attended = F.scaled_dot_product_attention(
            rows.transpose(1, 2),
            kv[..., :head_size],
            kv[..., head_size:],
            attn_mask=group.mask,
            scale=scale,
            enable_gqa=query.shape[1] != kv.shape[1],
        ).transpose(1, 2)  # [G, Q, nh, D]
        if group.tokens is None:
            out[mine].unflatten(0, size).copy_(attended)
        else:
            kept = attended.flatten(0, 1).index_select(0, group.used)
            out.index_copy_(0, group.used_tokens, kept)
    if plan.num_tokens < len(out):
        out[plan.num_tokens :].zero_()
    return out
