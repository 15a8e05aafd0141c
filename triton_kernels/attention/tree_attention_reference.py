"""Torch reference of `tree_attention`, which is also what runs in production on a CPU.

In two parts: what is the same in every layer of a step, and one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ..kv_cache.paged_rows import flat_rows, row_index

# Requests with at most so many query tokens (decode steps, trees) share one padded SDPA call on
# CPU; a longer prefill chunk is worth a call of its own.
MAX_BATCHED_QUERY = 64


@dataclass
class RequestGroup:
    """G requests whose queries are padded to Q tokens and whose entries are padded to L."""

    num_requests: int  # G
    first: int  # when `tokens` is None: the group is the G·Q tokens from here on, unpadded
    tokens: torch.Tensor | None  # [G, Q] int64 token of each query slot; padding repeats a token
    # With `tokens`:
    used: torch.Tensor | None  # [n] int64: the slots of the flattened [G, Q] that are no padding
    used_tokens: torch.Tensor | None  # [n] int64: their tokens
    block: torch.Tensor  # [G, L] int64
    offset: torch.Tensor  # [G, L] int64
    mask: torch.Tensor  # [G, 1, Q, L] float: 0 where visible, -inf elsewhere
    rows: dict[Any, torch.Tensor] = field(default_factory=dict)  # cache layout -> row numbers

    def gather(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The group's entries of one layer's cache -> [G, nkv, L, 2D]."""
        if kv_cache.dtype == torch.float8_e4m3fn:  # torch does not index what it cannot compute
            return self.gather(kv_cache.view(torch.uint8)).view(kv_cache.dtype)
        flat = flat_rows(kv_cache)
        if flat is None:
            return kv_cache[self.block, :, self.offset].transpose(1, 2)
        layout = (kv_cache.shape, kv_cache.stride())
        if layout not in self.rows:
            self.rows[layout] = row_index(kv_cache, self.block, self.offset, heads_dim=1).flatten()
        shape = (len(self.block), kv_cache.shape[1], self.block.shape[1], kv_cache.shape[3])
        # Several times faster than indexing the paged view with two index tensors.
        return flat.index_select(0, self.rows[layout]).view(shape)

    def write(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Put the group's part, mine [G, Q, …], into whole [T, …]."""
        if self.tokens is None:
            count = mine.shape[0] * mine.shape[1]
            whole[self.first : self.first + count].unflatten(0, mine.shape[:2]).copy_(mine)
        else:
            used = mine.flatten(0, 1).index_select(0, self.used)  # type: ignore[arg-type]
            whole.index_copy_(0, self.used_tokens, used)  # type: ignore[arg-type]


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
    mask_words: torch.Tensor,
    tree_start: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    prefix_from: torch.Tensor | None = None,
) -> AttentionPlan:
    """Work out once per step which cache entries each request needs and which query sees which.

    Tensors as in `tree_attention`; query_start_host (R+1 integers) and seq_len_host (R integers,
    upper bounds) are on the host as a list or a numpy array. `dtype` is the queries'.
    """
    prefix = torch.stack(
        [torch.zeros_like(prefix_len) if prefix_from is None else prefix_from, prefix_len], dim=1
    )  # [T, 2]: from, to
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
            group_prefix = prefix[rows].view(len(members), width, 2)
            group_mask_words = mask_words[rows].view(len(members), width, mask_words.shape[1])
        else:
            slot = torch.arange(width)
            last = torch.tensor(lens)[:, None] - 1
            tokens = torch.tensor([start[r] for r in members])[:, None] + slot.minimum(last)
            # Built from host integers: the shape depends on no tensor's content.
            used = torch.tensor([g * width + i for g, n in enumerate(lens) for i in range(n)])
            used_tokens = tokens.flatten()[used]
            group_prefix, group_mask_words = prefix[tokens], mask_words[tokens]

        everyone = len(members) == len(query_len)
        which = slice(len(members)) if everyone else torch.tensor(members)
        seen = _mask_of(group_prefix, group_mask_words, tree_start[which], seqs)
        # What no row sees is not read, it may be unwritten or another request's: a masked entry
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


def _mask_of(
    prefix: torch.Tensor, mask_words: torch.Tensor, tree_start: torch.Tensor, seqs: list[int]
) -> torch.Tensor:
    """The rule of this module, unpacked.

    prefix [G, Q, 2] int32 (from, to), words [G, Q, W] int64, tree_start [G] int32, seqs: the
    entries of each request -> [G, Q, L] bool, L = max(seqs).
    """
    entry = torch.arange(max(seqs))
    bound = torch.tensor(seqs)[:, None, None]
    oldest, prefix = prefix[..., None].clamp(max=bound[..., None]).unbind(2)  # [G, Q, 1]
    bits = ((mask_words[..., None] >> torch.arange(64)) & 1).flatten(2).bool()
    column = tree_start.long()[:, None, None] + torch.arange(bits.shape[-1])
    # A column may be in the prefix already: scattering must not take it away.
    bits = (bits & (column < bound)) | ((column >= oldest) & (column < prefix))
    # Columns past the end all land in one spare column that is cut off again.
    seen = F.pad((entry >= oldest) & (entry < prefix), (0, 1))
    seen.scatter_(2, column.clamp(max=len(entry)).expand_as(bits), bits)
    return seen[..., :-1]


def attend_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor,
    *,
    soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One layer's attention under `plan`; arguments as in `tree_attention`.

    Writes and returns out [T, nh, D].
    """
    plain = not soft_cap and key_scale is None and sinks is None
    for group in plan.groups:
        size = group.num_requests, group.mask.shape[2]
        kv = group.gather(kv_cache)
        if group.tokens is None:
            mine = slice(group.first, group.first + size[0] * size[1])
            rows = query[mine].unflatten(0, size)
        else:
            rows = query[group.tokens]
        rows, (key, value) = rows.transpose(1, 2), kv.chunk(2, dim=-1)
        if plain:
            # SDPA gives zeros for a query that sees nothing (all of its mask -inf).
            attended = F.scaled_dot_product_attention(
                rows,
                key,
                value,
                attn_mask=group.mask,
                scale=scale,
                enable_gqa=query.shape[1] != kv.shape[1],
            )
        else:
            factor = scale if key_scale is None else scale * key_scale
            attended = _attend_by_formula(rows, key, value, group.mask, factor, soft_cap, sinks)
            if value_scale is not None:
                attended = attended * value_scale
        group.write(out, attended.transpose(1, 2).to(out.dtype))
    if plan.num_tokens < len(out):
        out[plan.num_tokens :].zero_()
    return out


def _attend_by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    factor: float | torch.Tensor,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap, keys of another dtype or sinks, which SDPA lacks.

    query [G, nh, Q, D], key and value [G, nkv, L, D] of any dtype, mask [G, 1, Q, L] ->
    out [G, nh, Q, D] fp32.
    """
    heads = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(heads, dim=1) for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * factor
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + mask
    sums = scores.logsumexp(-1)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks.float()[None, :, None])
    weight = (scores - sums.masked_fill(sums == -torch.inf, 0)[..., None]).exp()
    return weight @ value
