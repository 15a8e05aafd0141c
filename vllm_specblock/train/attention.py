"""Who sees whom while training: all rows of a batch of windows in one pass per block.

The two classes here are the `attend` callables of `SpecBlockDrafter.forward`. What a position
sees is what it sees at inference (paper, Appendix A.2), so that nothing is learned that serving
cannot give: every entry of its document's earlier rows' block 1, the path to its own block, and
its own block up to itself. A block >= 2 never sees another row's block >= 2.

Each class says who sees whom once, as a predicate over index tensors (`sees`). Flex attention
compiles it into its kernel and skips what is empty; the dense form evaluates it into a mask, and
is the one that a reader or a machine without a GPU takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from vllm_specblock.train.text.batch import Batch

Kernel = Literal["sdpa", "flex"]


class TrainingAttention(ABC):
    """`attend` of one block; keeps each layer's keys and values, with their gradients, for the
    blocks that follow."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask = None

    @abstractmethod
    def sees(self, window: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether query entries see key entries; index tensors of shapes that broadcast."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend over a window's entries: query [B, n, nh, D], key and value [B, m, nkv, D]."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if self.kernel == "flex":
            mixed = flex()(q, k, v, block_mask=self._block_mask(q, k), enable_gqa=True)
        elif self._is_causal():
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mask = self._dense_mask(q, k)
            mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return mixed.transpose(1, 2)

    def _is_causal(self) -> bool:
        return False

    def _dense_mask(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, 1, n, m] bool."""
        if self._mask is None:
            window, query, key = (torch.arange(n, device=q.device) for n in _sizes(q, k))
            self._mask = self.sees(window[:, None, None], query[:, None], key)[:, None]
        return self._mask

    def _block_mask(self, q: Tensor, k: Tensor):
        if self._mask is None:
            windows, queries, keys = _sizes(q, k)
            self._mask = create_block_mask(
                lambda window, head, query, key: self.sees(window, query, key),
                windows,
                None,
                queries,
                keys,
                device=q.device,
            )
        return self._mask


class FirstBlock(TrainingAttention):
    """Block 1 of every row: causal over the flat index row·K + position, within a document.

    Args:
        batch: B windows of L columns; row t is column t, for all but the last column.
        block_size: K.
    """

    def __init__(self, batch: Batch, block_size: int, kernel: Kernel = "sdpa"):
        super().__init__(kernel)
        self.windows, self.block_size = len(batch), block_size
        column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        self.begin = (column - batch.position) * block_size  # [B, L], a document's first entry
        # Past the last document nothing counts, so plain causality does there as well.
        self.single = not bool((batch.begins() > 0).any()) if kernel == "sdpa" else False

    def sees(self, window: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= self.begin[window, query // self.block_size])

    def _is_causal(self) -> bool:
        return self.single

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B·S, K, nh, D], key and value [B·S, K, nkv, D] -> [B·S, K, nh, D]."""
        q, k, v = (x.reshape(self.windows, -1, *x.shape[2:]) for x in (query, key, value))
        self.kept.setdefault(layer, (k, v))  # once: activation checkpointing calls twice
        return self.mix(q, k, v).reshape(query.shape)


class NextBlock(TrainingAttention):
    """A block >= 2 at chosen rows, each started from position `cut` of the block before.

    Args:
        before: the block whose position `cut` each start continues.
        source: [B, R] int64, which of that block's rows each of the R starts continues.
        cut: 1..K; positions 1..cut of that block lie on the path.
    """

    def __init__(self, before: FirstBlock | NextBlock, source: Tensor, cut: int):
        super().__init__(before.kernel)
        self.before, self.source, self.cut = before, source, cut
        self.block_size = before.block_size
        if isinstance(before, FirstBlock):
            self.first, self.row = before, source
            self.reach = cut
        else:
            self.first = before.first
            self.row = before.row.gather(1, source)  # [B, R], row of block 1
            self.reach = before.reach  # positions of the row's own block 1 on the path
        self.own = self.block_size + self._lead  # entries of one start: its path, then itself
        self.prefix = (self.first.begin.shape[1] - 1) * self.block_size  # block 1's entries
        # Per start, as tensors: cuts that change from batch to batch recompile nothing.
        self.low = self.first.begin.gather(1, self.row)
        self.high = (self.row * self.block_size + self.reach).clamp(max=self.prefix)
        starts = torch.arange(self.row.shape[1], device=self.row.device)
        self.own_low = self.prefix + starts * self.own
        self.own_high = self.own_low + self._lead

    @property
    def _lead(self) -> int:
        """Entries on the path between block 1 and this block."""
        if isinstance(self.before, FirstBlock):
            return 0
        return self.before.own - self.block_size + self.cut

    def sees(self, window: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start, position = query // self.block_size, query % self.block_size
        in_prefix = (key >= self.low[window, start]) & (key < self.high[window, start])
        own = (key >= self.own_low[start]) & (key <= self.own_high[start] + position)
        return in_prefix | own

    def _path(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values of the blocks strictly between block 1 and this one, on the path."""
        if not self._lead:
            return None, None
        window = torch.arange(self.source.shape[0], device=self.source.device)[:, None]
        key, value = (kept[window, self.source, : self._lead] for kept in self.before.kept[layer])
        return key, value

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B·R, K, nh, D], key and value [B·R, K, nkv, D] -> [B·R, K, nh, D]."""
        windows, starts = self.row.shape
        own = []
        for between, mine in zip(self._path(layer), (key, value)):
            mine = mine.reshape(windows, starts, *mine.shape[1:])
            own.append(mine if between is None else torch.cat([between, mine], dim=2))
        self.kept.setdefault(layer, (own[0], own[1]))  # [B, R, own, nkv, D] each
        prefix = self.first.kept[layer]
        k, v = (torch.cat([p, o.flatten(1, 2)], 1) for p, o in zip(prefix, own))
        q = query.reshape(windows, -1, *query.shape[2:])
        return self.mix(q, k, v).reshape(query.shape)


@cache
def flex():
    """Flex attention, compiled where it has a kernel with a backward pass."""
    if torch.cuda.is_available():
        return torch.compile(flex_attention, dynamic=True)
    return flex_attention


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """(B, n, m) of q [B, nh, n, D] and k [B, nkv, m, D]."""
    return q.shape[0], q.shape[2], k.shape[2]
