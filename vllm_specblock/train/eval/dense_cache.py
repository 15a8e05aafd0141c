"""Dense KV cache of one sequence: drafter attention in its plainest form, for evaluation and tests.

* A row of block 1 sees all K positions of every earlier row, and its own up to itself. Its K keys
  and values stay in the cache.
* A row of a later block starts at a position of an earlier block's row. It sees what that position
  sees, and its own positions up to itself. Rows of one block never see each other, and their keys
  and values do not stay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.drafters.eagle3.config import Eagle3Shape
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.train.attention import sdpa


class DenseCache:
    """The drafter's cache of ONE sequence; K = 1 for EAGLE-3.

    Attributes:
        key, value: per layer [rows, K, nkv, D]; keys carry their RoPE.
    """

    def __init__(
        self,
        config: DrafterConfig | Eagle3Shape,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        block = config.block_size if isinstance(config, DrafterConfig) else 1
        shape = (0, block, config.num_key_value_heads, config.head_dim)
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

    def grow(self, row: Tensor | None = None) -> DenseBlockCache:
        """Later blocks over this cache. row [R] int64: the drafting rows (default: the newest)."""
        if row is None:
            row = torch.tensor([self.rows - 1], device=self.key[0].device)
        return DenseBlockCache(self, row)


class AppendRows:
    """`attend` of one forward of block 1: appends the rows, all of them in every layer."""

    def __init__(self, cache: DenseCache, keep: Tensor | None) -> None:
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
        mixed = sdpa(
            query.flatten(0, 1),
            cache.key[layer].flatten(0, 1),
            cache.value[layer].flatten(0, 1),
            mask,
        )
        return mixed.view_as(query)


class DenseBlockCache:
    """The rows of blocks >= 2 that grow from drafting rows of one cache.

    Rows are numbered in the order in which they are drafted: first the R drafting rows, then
    the starts of block 2, then those of block 3, and so on. With R = 1 that is `Starts.row`.

    Attributes:
        key, value: per layer [E, nkv, D], every entry: position k of the cache's row i is entry
            i·K + k, up to the last drafting row; the later rows' entries follow.
        sees: [rows, K, E] bool, the entries that each position of each row sees.
    """

    def __init__(self, cache: DenseCache, row: Tensor) -> None:
        rows = int(row.max()) + 1
        self.key = [key[:rows].flatten(0, 1) for key in cache.key]
        self.value = [value[:rows].flatten(0, 1) for value in cache.value]
        self.block = cache.key[0].shape[1]
        own = row[:, None] * self.block + torch.arange(self.block, device=row.device)
        self.sees = torch.arange(len(self.key[0]), device=row.device) <= own[..., None]

    def starts(self, row: Tensor, position: Tensor) -> LaterBlock:
        """`attend` of the next block's forward, which has to run before the next call.

        row [S] int64: the row that start s continues; position [S] int64, 0-based, in that row.
        """
        count, block = len(row), self.block
        path = self.sees[row, position][:, None].expand(-1, block, -1)
        alone = torch.eye(count, dtype=torch.bool, device=row.device)
        causal = torch.ones(block, block, dtype=torch.bool, device=row.device).tril()
        own = (alone[:, None, :, None] & causal[None, :, None]).flatten(2)  # [S, K, S·K]
        sees = torch.cat([path, own], dim=2)
        self.sees = torch.cat([pad(self.sees, (0, count * block)), sees])
        return LaterBlock(self, sees.flatten(0, 1))


class LaterBlock:
    """`attend` of one forward of a block >= 2 over S starts. sees [S·K, E] bool: with the
    entries of these starts."""

    def __init__(self, growth: DenseBlockCache, sees: Tensor) -> None:
        self.growth, self.sees = growth, sees

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [S, K, nh, D], key and value [S, K, nkv, D] -> [S, K, nh, D]."""
        keys, values = self.growth.key, self.growth.value
        keys[layer] = torch.cat([keys[layer], key.flatten(0, 1)])
        values[layer] = torch.cat([values[layer], value.flatten(0, 1)])
        mixed = sdpa(query.flatten(0, 1), keys[layer], values[layer], self.sees)
        return mixed.view_as(query)
