"""Tree attention metadata of a batch, shared by all layers."""

from __future__ import annotations

import itertools
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .sliding_window import see_last
from .tree_attention import tree_attention
from .tree_attention_reference import AttentionPlan, attend_reference, plan_reference

if TYPE_CHECKING:  # they need numba
    import numpy as np

    from .cpu_attention import PackedSchedule, Rows
    from .cpu_packing import Packing


def packing_on_cpu(kv_cache: torch.Tensor, amx: bool | None = None) -> Packing | None:
    """How a cache [blocks, kv heads, N, 2D] is packed for a CPU's vector units; None: it is not.

    Where the kernels know its form, which a page may have on a CPU only, and with numba.
    amx: for tiles; by default wherever the processor has them.
    """
    if kv_cache.device.type != "cpu" or find_spec("numba") is None:
        return None
    from .cpu_packing import packing_of

    return packing_of(kv_cache, torch.cpu._is_amx_tile_supported() if amx is None else amx)


@cache
def _loops() -> ModuleType:
    """What needs numba."""
    from . import cpu_attention

    return cpu_attention


class LayerMask(NamedTuple):
    """What the queries of a step see in some of the layers."""

    prefix_from: torch.Tensor | None  # [T] int32
    mask_words: torch.Tensor  # [T, W] int64
    plan: AttentionPlan | None  # on a CPU


class TreeAttentionBatch:
    """Queries of R requests, one request after the other, and what each of them sees.

    Query t of request r sees cache entries 0 … prefix_len[t] − 1 of its request, and entry
    tree_start[r] + j where bit j of words[t] is set.

    Args (T queries, R requests, W words):
        block_table: [R, max blocks] int32.
        block_size: cache entries in one block.
        query_start: [R+1] int32, and `query_start_host`, the same on the host.
        seq_len: [R] int32, entries beyond which no query of the request sees anything;
            `seq_len_host`, an upper bound of it on the host.
        prefix_len: [≥T] int32.
        mask_words: [≥T, W] int64.
        tree_start: [≥R] int32.
        max_seq_len: bound of every `seq_len` for as long as the launch may be replayed; by
            default that of `seq_len_host`, which a captured graph would outgrow.
        max_query_len: bound of every request's queries, likewise.
        unknown_up_to: requests of up to so many queries may have other lengths than
            `query_start_host` says, and still want the same bits as in any other batch of one
            engine; 0: none has.

    The first layer computes what all layers share: set `plan` to None when the tensors change.
    """

    def __init__(
        self,
        block_table: torch.Tensor,
        block_size: int,
        query_start: torch.Tensor,
        query_start_host: list[int],
        seq_len: torch.Tensor,
        seq_len_host: list[int],
        prefix_len: torch.Tensor,
        mask_words: torch.Tensor,
        tree_start: torch.Tensor,
        max_seq_len: int | None = None,
        max_query_len: int | None = None,
        unknown_up_to: int = 0,
    ):
        self.block_table, self.query_start, self.seq_len = block_table, query_start, seq_len
        self.prefix_len, self.mask_words, self.tree_start = prefix_len, mask_words, tree_start
        self.block_size = block_size
        self.query_start_host, self.seq_len_host = query_start_host, seq_len_host
        self.max_seq_len = max_seq_len or max(seq_len_host)
        self.host_lens = {end - start for start, end in itertools.pairwise(query_start_host)}
        self.max_query_len = max_query_len or max(self.host_lens)
        self.unknown_up_to = unknown_up_to
        # Keyed by window, for a packed cache by more.
        self.plan: dict[Any, Any] | None = None

    @property
    def query_lens(self) -> set[int]:
        """Lengths of requests, as `tree_attention` wants them."""
        longest = self.max_query_len
        if self.unknown_up_to:
            return {longest}
        return {longest, *(length for length in self.host_lens if length < longest)}

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
        packing: Packing | None = None,
        causal_elsewhere: bool = False,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            query, kv_cache, scale, out, soft_cap, key_scale, value_scale, sinks: see
                `tree_attention`; `out` is made if not given.
            window: a query sees only the last so many entries of what it would see.
            packing: layout of a packed cache, on a CPU; None: not packed.
            causal_elsewhere: leave the rows of `causal` requests as they are. Of a packed cache.
        """
        if out is None:
            out = torch.empty_like(query)
        if packing is not None:
            group = query.shape[1] // packing.kv_heads
            plan = self._plan_packed(window, group, packing.kv_heads, causal_elsewhere)
            value_factor = 1.0
            if key_scale is not None and value_scale is not None:
                scale *= key_scale.item()  # a host tensor
                value_factor = value_scale.item()  # a host tensor
            return _loops().attend_packed(
                query,
                kv_cache,
                packing,
                self.block_table,
                plan,
                scale,
                out,
                soft_cap,
                value_factor,
                sinks,
            )
        metadata = self._see(window, query)
        rare: dict[str, Any] = {
            "soft_cap": soft_cap,
            "key_scale": key_scale,
            "value_scale": value_scale,
            "sinks": sinks,
        }
        if query.is_cuda:
            return tree_attention(
                query,
                kv_cache,
                self.block_table,
                self.query_start,
                self.query_lens,
                self.seq_len,
                self.max_seq_len,
                self.prefix_len,
                metadata.mask_words,
                self.tree_start,
                scale,
                out,
                prefix_from=metadata.prefix_from,
                unknown_up_to=self.unknown_up_to,
                **rare,
            )
        gathered: Any = metadata.plan  # never None on a CPU
        return attend_reference(query, kv_cache, gathered, scale, out, **rare)

    def _see(self, window: int | None, query: torch.Tensor) -> LayerMask:
        """Return the mask under `window`; the first layer of each window computes it."""
        if self.plan is None:
            self.plan = {}
        if window not in self.plan:
            prefix_from, mask_words, plan = None, self.mask_words, None
            if window is not None:
                prefix_from, mask_words = see_last(self.prefix_len, mask_words, window)
            if not query.is_cuda:
                plan = plan_reference(
                    self.block_table,
                    self.block_size,
                    self.query_start_host,
                    self.seq_len_host,
                    self.prefix_len,
                    mask_words,
                    self.tree_start,
                    query.dtype,
                    prefix_from,
                )
            self.plan[window] = LayerMask(prefix_from, mask_words, plan)
        return self.plan[window]

    def causal(self) -> np.ndarray:
        """[R] bool, on a CPU: requests whose rows see all up to their own, and nothing else."""
        if self.plan is None:
            self.plan = {}
        if "causal" not in self.plan:
            self.plan["causal"] = _loops().find_causal(*self._rows(self.mask_words))
        return self.plan["causal"]

    def _plan_packed(
        self, window: int | None, group: int, kv_heads: int, causal_elsewhere: bool
    ) -> PackedSchedule:
        """What is the same in every layer with this window, worked out by the first that asks."""
        if self.plan is None:
            self.plan = {}
        key = window, group, kv_heads, causal_elsewhere
        if key not in self.plan:
            left_out = self.causal() if causal_elsewhere else None
            prefix_from, mask_words = None, self.mask_words
            if window is not None:
                prefix_from, mask_words = see_last(self.prefix_len, mask_words, window)
            rows = self._rows(mask_words)
            self.plan[key] = _loops().plan_packed(rows, group, kv_heads, left_out, prefix_from)
        return self.plan[key]

    def _rows(self, mask_words: torch.Tensor) -> Rows:
        return _loops().rows_of(
            self.query_start_host, self.seq_len, self.prefix_len, mask_words, self.tree_start
        )
