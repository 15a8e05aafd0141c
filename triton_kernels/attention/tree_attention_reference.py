"""Torch reference of tree attention; also used for unpacked caches on a CPU."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from ..op import op
from .tree_attention import BatchBounds, ScoreOptions, VisibleEntries, tree_attention_triton


@op(tree_attention_triton)
def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    seen: VisibleEntries,
    bounds: BatchBounds,
    scores: ScoreOptions,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attend T query tokens of R requests, in order.

    Args:
        query: [T, nh, D] fp32, bf16 or fp16; or float8_e4m3fn if the cache is. Weights are then
            rounded to it, scaled so that the largest is 256 (in the kernel, the largest so far).
        kv_cache: [num_blocks, nkv, block_size, 2D], any strides, keys first, of the queries' dtype
            or float8_e4m3fn; nh is a multiple of nkv. With Dv < D it is [·, D], keys, which begin
            with their values (multi-head latent attention).
        out: [T, nh, Dv], written and returned; zeros for queries without visible entries and for
            tokens past query_start[R]. Dv is D, or less. Of any dtype with float8 queries.
    """
    size = kv_cache.shape[2]
    lengths = seen.seq_len.clamp(max=bounds.max_seq_len).tolist()
    # Torch does not index float8.
    memory = kv_cache.view(torch.uint8) if kv_cache.itemsize == 1 else kv_cache
    out.zero_()
    for request, (first, end) in enumerate(pairwise(seen.query_start.tolist())):
        rows = slice(first, end)
        visible = visible_entries(seen, request, rows, lengths[request])
        # Entries that no row sees are not read: they may be unwritten, and 0 · NaN is NaN.
        entry = visible.any(0).nonzero().flatten()
        if len(entry):
            block = seen.block_table[request].long()[entry // size]
            entries = memory[block, :, entry % size].view(kv_cache.dtype)
            key, value = entries.transpose(0, 1).tensor_split([query.shape[2]], dim=-1)
            if out.shape[2] < query.shape[2]:
                value = key[..., : out.shape[2]]
            asked = query[rows].transpose(0, 1)
            out[rows] = _attend(asked, key, value, visible[:, entry], scores).transpose(0, 1)
    return out


def visible_entries(seen: VisibleEntries, request: int, rows: slice, count: int) -> torch.Tensor:
    """Return [rows, count] bool, which of a request's first entries its rows see."""
    entry = torch.arange(count, device=seen.mask_words.device)
    oldest = 0 if seen.prefix_from is None else seen.prefix_from[rows, None]
    in_prefix = (entry >= oldest) & (entry < seen.prefix_len[rows, None])
    words = seen.mask_words[rows]
    column = entry - seen.tree_start[request]
    word = (column // 64).clamp(0, words.shape[1] - 1)
    in_words = (column >= 0) & (column < 64 * words.shape[1])
    return in_prefix | (((words[:, word] >> column % 64) & 1 > 0) & in_words)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scores: ScoreOptions,
) -> torch.Tensor:
    """query [nh, Q, D], key and value [nkv, L, D or Dv], visible [Q, L] bool -> [nh, Q, Dv]."""
    group = len(query) // len(key)
    if not scores.soft_cap and scores.key_scale is None and scores.sinks is None:
        mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        # SDPA returns zeros for a query without visible entries.
        return F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask.masked_fill_(~visible, float("-inf")),
            scale=scores.scale,
            enable_gqa=group > 1,
        )[0]
    key, value = (x.float().repeat_interleave(group, dim=0) for x in (key, value))
    score = query.float() @ key.transpose(-1, -2) * scores.scale
    for stored in (scores.query_scale, scores.key_scale):
        if stored is not None:
            score = score * stored
    if scores.soft_cap:
        score = scores.soft_cap * torch.tanh(score / scores.soft_cap)
    score = score.masked_fill(~visible, float("-inf"))
    total = score.logsumexp(-1)
    if scores.sinks is not None:
        total = torch.logaddexp(total, scores.sinks.float()[:, None])
    weight = (score - total.masked_fill(total == -torch.inf, 0)[..., None]).exp()
    if query.dtype == torch.float8_e4m3fn:
        largest = weight.amax(-1, keepdim=True)
        unit = largest.masked_fill(largest == 0, 1) / 256
        weight = (weight / unit).to(query.dtype).float() * unit
    out = weight @ value
    if scores.value_scale is not None:
        out = out * scores.value_scale
    return out
