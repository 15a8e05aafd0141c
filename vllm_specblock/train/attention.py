"""Training attention mask: all rows of a batch of windows in one pass per block.

The two classes are the `attend` callables of `SpecBlockModel.forward`. A position sees the same as
at inference (paper, Appendix A.2): block 1 of its document's earlier rows, the path to its own
block, and its own block up to itself. A block >= 2 never sees another row's block >= 2.

The mask is a predicate over index tensors (`sees`), which flex attention compiles into its kernel.
Without a GPU (`sdpa`) the batch is cut into independent pieces: block 1 into causal documents, a
later block into a few starts at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from vllm_specblock.train.data.batch import Batch

Kernel = Literal["sdpa", "flex"]

_STARTS = 32
"""Maximum starts of a later block per `sdpa` call: more compute masked scores, fewer need more
calls."""


class TrainingAttention(ABC):
    """`attend` of one block; keeps each layer's keys and values, with gradients, for later
    blocks."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask: BlockMask | None = None

    @abstractmethod
    def sees(self, window: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether query entries see key entries; the index tensors broadcast."""

    def _flex(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend over a window's entries: query [B, n, nh, D], key and value [B, m, nkv, D]."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if self._mask is None:
            self._mask = create_block_mask(
                lambda window, head, query, key: self.sees(window, query, key),
                q.shape[0],
                None,
                q.shape[2],
                k.shape[2],
                device=q.device,
            )
        mixed = flex()(q, k, v, block_mask=self._mask, enable_gqa=True)
        return mixed.transpose(1, 2)


class FirstBlock(TrainingAttention):
    """Block 1 of every row (columns 0 .. L − 2): causal over the flat index row·K + position,
    within a document."""

    def __init__(self, batch: Batch, block_size: int, kernel: Kernel = "sdpa") -> None:
        super().__init__(kernel)
        self.windows, self.block_size = len(batch), block_size
        column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        self.begin = (column - batch.position) * block_size  # [B, L], a document's first entry
        self.batch = batch

    def sees(self, window: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= self.begin[window, query // self.block_size])

    @cached_property
    def lengths(self) -> list[int]:
        """Return the entries of each document, by window; padding counts as one more."""
        rows, lengths = self.begin.shape[1] - 1, []
        for begins, inside in zip(self.begin.tolist(), (self.batch.tokens >= 0).sum(1).tolist()):
            end = min(inside, rows)
            cuts = [*sorted(set(begins[:end])), end * self.block_size]
            cuts += [rows * self.block_size] if end < rows else []
            lengths += [b - a for a, b in pairwise(cuts)]
        return lengths

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B·S, K, nh, D], key and value [B·S, K, nkv, D] -> [B·S, K, nh, D]."""
        q, k, v = (x.reshape(self.windows, -1, *x.shape[2:]) for x in (query, key, value))
        self.kept.setdefault(layer, (k, v))  # once: activation checkpointing calls twice
        if self.kernel == "flex":
            return self._flex(q, k, v).reshape(query.shape)
        # Split, not sliced: the gradient of a slice has the size of the whole tensor.
        documents = zip(*(x.flatten(0, 1).split(self.lengths) for x in (q, k, v)))
        return torch.cat([sdpa(*document) for document in documents]).view(query.shape)


class NextBlock(TrainingAttention):
    """A block >= 2, whose R starts continue rows `source` [B, R] int64 of the block `before` from
    its position `restart_position` (1..K)."""

    def __init__(
        self, before: FirstBlock | NextBlock, source: Tensor, restart_position: int
    ) -> None:
        super().__init__(before.kernel)
        self.before, self.source = before, source
        self.block_size: int = before.block_size
        # [B, R], row of block 1; positions of the row's own block 1 on the path; and entries on
        # the path between block 1 and this block.
        if isinstance(before, FirstBlock):
            self.first, self.row, self.reach, self.lead = before, source, restart_position, 0
        else:
            self.first, self.row = before.first, before.row.gather(1, source)
            self.reach, self.lead = before.reach, before.lead + restart_position
        self.own = self.block_size + self.lead  # entries of one start: its path, then itself
        self.prefix = (self.first.begin.shape[1] - 1) * self.block_size  # block 1's entries
        # Per start, as tensors, so that new cuts need no recompilation.
        self.low = self.first.begin.gather(1, self.row)
        self.high = (self.row * self.block_size + self.reach).clamp(max=self.prefix)
        starts = torch.arange(self.row.shape[1], device=self.row.device)
        self.own_low = self.prefix + starts * self.own
        self.own_high = self.own_low + self.lead

    def sees(self, window: Tensor, query: Tensor, key: Tensor) -> Tensor:
        start, position = query // self.block_size, query % self.block_size
        in_prefix = (key >= self.low[window, start]) & (key < self.high[window, start])
        own = (key >= self.own_low[start]) & (key <= self.own_high[start] + position)
        return in_prefix | own

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B·R, K, nh, D], key and value [B·R, K, nkv, D] -> [B·R, K, nh, D]."""
        windows, starts = self.row.shape
        own = [x.reshape(windows, starts, *x.shape[1:]) for x in (key, value)]
        if self.lead:
            window = torch.arange(windows, device=self.source.device)[:, None]
            paths = (kept[window, self.source, : self.lead] for kept in self.before.kept[layer])
            own = [torch.cat(pair, dim=2) for pair in zip(paths, own)]
        self.kept.setdefault(layer, (own[0], own[1]))  # [B, R, own, nkv, D] each
        prefix = self.first.kept[layer]
        if self.kernel == "flex":
            q = query.reshape(windows, -1, *query.shape[2:])
            k, v = (torch.cat([p, o.flatten(1, 2)], 1) for p, o in zip(prefix, own))
            return self._flex(q, k, v).reshape(query.shape)
        return self._by_groups(query, prefix, own).view(query.shape)

    def _by_groups(self, query: Tensor, prefix: tuple[Tensor, Tensor], own: list[Tensor]) -> Tensor:
        """query [B·R, K, nh, D]; keys and values: prefix [B, S·K, nkv, D], own [B, R, own, nkv, D]
        -> [B·R·K, nh, D]."""
        sizes = [len(mask) // self.block_size for _, _, mask in self._groups]
        queries = query.split(sizes)
        paths = zip(*(x.flatten(0, 1).split(sizes) for x in own))
        windows = list(zip(*(x.unbind() for x in prefix)))
        mixed = []
        for (window, seen, mask), mine, path in zip(self._groups, queries, paths):
            key, value = (
                torch.cat([before[seen], after.flatten(0, 1)])
                for before, after in zip(windows[window], path)
            )
            mixed.append(sdpa(mine.flatten(0, 1), key, value, mask))
        return torch.cat(mixed)

    @cached_property
    def _groups(self) -> list[tuple[int, slice, Tensor]]:
        """Return groups of a window's starts, in order: the window, the entries of block 1 that
        they see, and their mask [starts · K, entries seen + starts · own] bool."""
        device, groups = self.row.device, []
        for window, (lows, highs) in enumerate(zip(self.low.tolist(), self.high.tolist())):
            for first in range(0, len(lows), _STARTS):
                last = min(first + _STARTS, len(lows))
                seen = slice(min(lows[first:last]), max(highs[first:last]))
                query = torch.arange(first * self.block_size, last * self.block_size)
                own = torch.arange(first * self.own, last * self.own) + self.prefix
                key = torch.cat([torch.arange(seen.start, seen.stop), own]).to(device)
                number = torch.tensor(window, device=device)
                groups.append((window, seen, self.sees(number, query.to(device)[:, None], key)))
        return groups


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """query [n, nh, D], key and value [m, nkv, D] -> [n, nh, D]; without a mask causal."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mixed = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


@cache
def flex() -> Callable[..., Tensor]:
    """Flex attention, compiled where it has a kernel with a backward pass."""
    if torch.cuda.is_available():
        return torch.compile(flex_attention, dynamic=True)
    return flex_attention
