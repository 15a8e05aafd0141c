"""Who sees whom inside the drafter, in its plainest form: one sequence, dense tensors.

* A row of block 1 sees all K positions of every earlier row, and its own up to itself. Its K
  keys and values stay in the cache.
* A row of a later block starts at position j of a row of the block before. It sees all rows of
  block 1 before the drafting row (the newest), then the path that leads to it: positions up to
  the start in the drafting row, up to the next start in that start's row, and so on. Then its
  own positions up to itself. Starts never see each other, and nothing of theirs stays.

Serving does the same over paged caches (`paged.py`), training over whole batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_specblock.draft.config import DrafterConfig


class DenseCache:
    """The drafter's cache of ONE sequence.

    Attributes:
        key, value: per layer [rows, K, nkv, D]; keys carry their RoPE.
    """

    def __init__(
        self,
        config: DrafterConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (0, config.block_size, config.num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.key = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.value = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]

    @property
    def rows(self) -> int:
        """Rows of block 1 so far; the newest is the one that drafts."""
        return len(self.key[-1])

    def append(self, keep: Tensor | None = None) -> AppendRows:
        """`attend` for block 1 over new rows; `keep` [Q] as given to the drafter's forward."""
        return AppendRows(self, keep)

    def starts(self, position: Tensor) -> LaterBlock:
        """`attend` for block 2. position [S] int64, 0-based: start s continues the drafting
        row's position `position[s]`."""
        drafting = [(k[-1:], v[-1:]) for k, v in zip(self.key, self.value)]
        row = torch.zeros_like(position)
        return LaterBlock(self, drafting, None, row, position)


class AppendRows:
    """`attend` of one forward of block 1: appends the rows, all of them in every layer."""

    def __init__(self, cache: DenseCache, keep: Tensor | None):
        self.cache, self.keep = cache, keep

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [Q, K, nh, D], key and value [T, K, nkv, D] -> [Q, K, nh, D]."""
        cache, block = self.cache, key.shape[1]
        cache.key[layer] = torch.cat([cache.key[layer], key])
        cache.value[layer] = torch.cat([cache.value[layer], value])
        total = len(cache.key[layer])
        row = torch.arange(total - len(key), total, device=key.device)
        if self.keep is not None and layer == len(cache.key) - 1:
            row = row[self.keep]
        # Flat over (row, position), "all earlier rows and my own up to me" is plain causality.
        own = row[:, None] * block + torch.arange(block, device=key.device)
        mask = torch.arange(total * block, device=key.device) <= own.flatten()[:, None]
        mixed = _attention(
            query.flatten(0, 1),
            cache.key[layer].flatten(0, 1),
            cache.value[layer].flatten(0, 1),
            mask,
        )
        return mixed.view_as(query)


class LaterBlock:
    """`attend` of one forward of a block >= 2 over S starts; itself the ground of the next.

    Args:
        cache: the sequence's; its newest row is the drafting row.
        before: per layer, keys and values [rows, P, nkv, D] of the block before, each row led
            by the path to it.
        path_mask: [rows, P - K] bool, what of that lead is on the path; None for block 1.
        row: [S] int64, row of the block before which start s continues.
        position: [S] int64, 0-based position in that row.
    """

    def __init__(
        self,
        cache: DenseCache,
        before: list[tuple[Tensor, Tensor]],
        path_mask: Tensor | None,
        row: Tensor,
        position: Tensor,
    ):
        self.cache = cache
        self.block = cache.key[0].shape[1]
        self.path = [(key[row], value[row]) for key, value in before]
        mask = torch.arange(self.block, device=position.device) <= position[:, None]
        self.mask = mask if path_mask is None else torch.cat([path_mask[row], mask], dim=1)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [S, K, nh, D], key and value [S, K, nkv, D] -> [S, K, nh, D]."""
        path_key, path_value = self.path[layer]
        key, value = torch.cat([path_key, key], dim=1), torch.cat([path_value, value], dim=1)
        self.seen.append((key, value))
        prefix_key, prefix_value = (
            kept[layer][:-1].flatten(0, 1) for kept in (self.cache.key, self.cache.value)
        )
        causal = torch.ones(self.block, self.block, dtype=torch.bool, device=key.device).tril()
        prefix_mask = causal.new_ones(self.block, len(prefix_key))
        return torch.stack(
            [
                _attention(
                    query[start],
                    torch.cat([prefix_key, key[start]]),
                    torch.cat([prefix_value, value[start]]),
                    torch.cat([prefix_mask, on_path.expand(self.block, -1), causal], dim=1),
                )
                for start, on_path in enumerate(self.mask)
            ]
        )

    def starts(self, row: Tensor, position: Tensor) -> LaterBlock:
        """`attend` for the block after this one, once this one's forward has run.

        row [S'] int64: the start of this block that is continued; position [S'] int64, 0-based.
        """
        return LaterBlock(self.cache, self.seen, self.mask, row, position)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query [n, nh, D], key and value [m, nkv, D], mask [n, m] bool -> [n, nh, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1)
