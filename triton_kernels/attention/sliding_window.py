"""Sliding-window mask for tree nodes.

What a token sees ends with the token itself and has one entry per position, so the last `window`
positions are the last `window` entries that it sees, wherever they lie.
"""

from __future__ import annotations

import torch


def see_last(
    prefix_len: torch.Tensor, mask_words: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut every query's sight to the last `window` entries of it.

    Args (T queries, W mask_words): as in `TreeAttentionBatch`.
        prefix_len: [T] int32.
        mask_words: [T, W] int64.
        window: entries that a query sees at most, itself included.

    Returns:
        prefix_from: [T] int32, the first entry of the prefix that is seen; prefix_len or more
            where none is.
        mask_words: [T, W] int64 without the bits that are too old.
    """
    bit = torch.arange(64, device=mask_words.device)
    bits = ((mask_words[..., None] >> bit) & 1).flatten(1)  # [T, 64·W], the path from the root down
    # How many of the path there are from each bit on, itself included.
    newest = bits.flip(1).cumsum(1).flip(1)
    prefix_from = (prefix_len + newest[:, 0] - window).clamp(min=0).int()
    if window >= bits.shape[1]:  # no path is longer
        return prefix_from, mask_words
    kept = (bits * (newest <= window)).unflatten(1, (-1, 64))
    # Bits do not overlap: the sum is their union, in wrapping arithmetic for bit 63.
    return prefix_from, (kept << bit).sum(-1)
