"""Tree attention metadata of a batch, shared by all layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from .tree_attention import BatchBounds, ScoreOptions, VisibleEntries
from .tree_attention_reference import tree_attention

if TYPE_CHECKING:  # they need numba
    import numpy as np

    from .cpu_packing import Packing


def packing_on_cpu(kv_cache: torch.Tensor, amx: bool | None = None) -> Packing | None:
    """Return the packing of a cache [blocks, kv heads, N, 2D] on a CPU; None: not packed.

    Packed caches need numba and a supported layout. amx: for AMX tiles; default: if available.
    """
    if kv_cache.device.type != "cpu" or find_spec("numba") is None:
        return None
    from .cpu_packing import packing_of

    return packing_of(kv_cache, torch.cpu._is_amx_tile_supported() if amx is None else amx)


@dataclass(eq=False)
class TreeAttentionBatch:
    """Queries of R requests in order, and their visible entries by the rule of `tree_attention.py`.

    T queries, W words. The first layer computes shared values: set `plan` to None when the tensors
    change.
    """

    block_table: torch.Tensor  # [R, max blocks] int32
    query_start: torch.Tensor  # [R+1] int32
    query_start_host: list[int]  # the same
    seq_len: torch.Tensor  # [R] int32, visible entries of the request
    max_seq_len: int  # upper bound of `seq_len` for all replays of the launch
    prefix_len: torch.Tensor  # [≥T] int32
    mask_words: torch.Tensor  # [≥T, W] int64
    tree_start: torch.Tensor  # [≥R] int32
    # Upper bound of a request's queries for all replays; None: from `query_start_host`.
    max_query_len: int | None = None
    # Requests of up to this many queries may have other lengths than in `query_start_host`, with
    # the same bits as in any batch; 0: none.
    unknown_up_to: int = 0
    # Keyed by window, for a packed cache by more.
    plan: dict[Any, Any] | None = field(default=None, init=False)

    @cached_property
    def bounds(self) -> BatchBounds:
        """Host numbers that determine the launches."""
        lengths = {end - start for start, end in itertools.pairwise(self.query_start_host)}
        longest = self.max_query_len or max(lengths)
        shorter = () if self.unknown_up_to else (n for n in lengths if n < longest)
        return BatchBounds({longest, *shorter}, self.max_seq_len, self.unknown_up_to)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
        *,
        window: int | None = None,
        soft_cap: float = 0.0,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        query_scale: torch.Tensor | None = None,
        packing: Packing | None = None,
        causal_elsewhere: bool = False,
    ) -> torch.Tensor:
        """Run the attention of one layer.

        Args:
            query, kv_cache, out: see `tree_attention`; `out` is allocated if None.
            scale, soft_cap, key_scale, value_scale, sinks, query_scale: see `ScoreOptions`.
            window: a query sees only the last `window` of its visible entries.
            packing: layout of a packed cache, on a CPU; None: not packed.
            causal_elsewhere: skip rows of `causal` requests; packed caches only.
        """
        if out is None:
            out = torch.empty_like(query)
        options = ScoreOptions(scale, soft_cap, key_scale, value_scale, sinks, query_scale)
        if packing is not None:
            from .cpu_attention import attend_batch

            how = packing, window, options, causal_elsewhere
            return attend_batch(self, query, kv_cache, out, *how)
        return tree_attention(query, kv_cache, self.see(window), self.bounds, options, out)

    def causal(self) -> np.ndarray:
        """Return [R] bool, requests with causal rows only; on a CPU."""
        from .cpu_attention import causal_requests

        return causal_requests(self)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return a value that all layers of a kind share; the first one computes it."""
        if self.plan is None:
            self.plan = {}
        if key not in self.plan:
            self.plan[key] = make()
        return self.plan[key]

    def see(self, window: int | None) -> VisibleEntries:
        """Return the visible entries under `window`."""

        def make() -> VisibleEntries:
            prefix_from, mask_words = None, self.mask_words
            if window is not None:
                prefix_from, mask_words = see_last(self.prefix_len, mask_words, window)
            tables = self.block_table, self.query_start, self.seq_len, self.prefix_len
            return VisibleEntries(*tables, prefix_from, mask_words, self.tree_start)

        return self.once(window, make)


def see_last(
    prefix_len: torch.Tensor, mask_words: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Restrict every query to its last `window` visible entries, itself included.

    The visible entries of a query end with itself, one per position.

    Returns:
        prefix_from: [T] int32, first visible entry of the prefix (≥ prefix_len: none); and
            mask_words [T, W] int64 without older bits.
    """
    bit = torch.arange(64, device=mask_words.device)
    bits = ((mask_words[..., None] >> bit) & 1).flatten(1)  # [T, 64·W], the path from the root down
    # Nodes of the path from each bit on, itself included.
    newest = bits.flip(1).cumsum(1).flip(1)
    prefix_from = (prefix_len + newest[:, 0] - window).clamp(min=0).int()
    if window >= bits.shape[1]:  # longest path
        return prefix_from, mask_words
    kept = (bits * (newest <= window)).unflatten(1, (-1, 64))
    # Bits do not overlap: the sum is their union, in wrapping arithmetic for bit 63.
    return prefix_from, (kept << bit).sum(-1)
