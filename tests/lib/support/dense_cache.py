"""Dense KV cache of one sequence: the reference of drafter attention.

* A row of block 1 sees all K positions of every earlier row, and its own up to itself. Its K keys
  and values stay in the cache.
* A row of a later block starts at a position of an earlier block's row. It sees what that position
  sees, and its own positions up to itself. Rows of one block never see each other, and their keys
  and values are not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.specblock.config import DrafterConfig
from vllm_specblock.train.attention import sdpa


class DenseCache:
    """The drafter's cache of ONE sequence.

    Attributes:
        key, value: per layer [rows, K, nkv, D]; keys carry their RoPE.
    """

    def __init__(self, config: DrafterConfig) -> None:
        shape = (0, config.block_size, config.num_key_value_heads, config.head_dim)
        self.key = [torch.empty(shape) for _ in range(config.num_hidden_layers)]
        self.value = [torch.empty(shape) for _ in range(config.num_hidden_layers)]

    @property
    def rows(self) -> int:
        """Rows of block 1 so far; the newest one drafts."""
        return len(self.key[-1])

    def append(self, keep: Tensor | None = None) -> Attend:
        """`attend` of one forward of block 1 over T new rows, which every layer keeps.

        keep [Q]: as given to the drafter's forward.
        """

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            block = key.shape[1]
            self.key[layer] = torch.cat([self.key[layer], key])
            self.value[layer] = torch.cat([self.value[layer], value])
            total = len(self.key[layer])
            row = torch.arange(total - len(key), total, device=key.device)
            if keep is not None and layer == len(self.key) - 1:
                row = row[keep]
            # The mask is causal over the flat index (row, position).
            own = row[:, None] * block + torch.arange(block, device=key.device)
            mask = torch.arange(total * block, device=key.device) <= own.flatten()[:, None]
            cached = (self.key[layer].flatten(0, 1), self.value[layer].flatten(0, 1))
            return sdpa(query.flatten(0, 1), *cached, mask).view_as(query)

        return attend

    def grow(self) -> DenseBlockCache:
        """Later blocks that grow from the newest row."""
        return DenseBlockCache(self)


class DenseBlockCache:
    """The rows of blocks >= 2, numbered in order: first the drafting row, then the starts of
    block 2, then those of block 3, and so on.

    Attributes:
        key, value: per layer [E, nkv, D], every entry: position k of the cache's row i is entry
            i·K + k; the later rows' entries follow.
        sees: [rows, K, E] bool, the entries that each position of each row sees.
    """

    def __init__(self, cache: DenseCache) -> None:
        self.key = [key.flatten(0, 1) for key in cache.key]
        self.value = [value.flatten(0, 1) for value in cache.value]
        self.block, count = cache.key[0].shape[1], len(self.key[0])
        own = torch.arange(count - self.block, count)
        self.sees = torch.arange(count) <= own[None, :, None]

    def starts(self, row: Tensor, position: Tensor) -> Attend:
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
        seen = sees.flatten(0, 1)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.key[layer] = torch.cat([self.key[layer], key.flatten(0, 1)])
            self.value[layer] = torch.cat([self.value[layer], value.flatten(0, 1)])
            mixed = sdpa(query.flatten(0, 1), self.key[layer], self.value[layer], seen)
            return mixed.view_as(query)

        return attend
