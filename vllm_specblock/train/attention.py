"""Who sees whom while training: all rows of a batch of sequences in one pass per block.

The two classes here are the `attend` callables of `SpecBlockDrafter.forward`. What a position
sees is what it sees at inference (paper, Appendix A.2), so that nothing is learned that serving
cannot give: every entry of earlier rows' block 1, the path to its own block, and its own block up
to itself. A block >= 2 never sees another row's block >= 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class FirstBlock:
    """Block 1 of every row: causal over the flat index row·K + position.

    Keeps each layer's keys and values, with their gradients, for the blocks that follow.
    """

    def __init__(self, batch: int):
        self.batch = batch
        self.kept: list[tuple[Tensor, Tensor]] = []  # per layer, [B, S·K, nkv, D] each

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B·S, K, nh, D], key and value [B·S, K, nkv, D] -> [B·S, K, nh, D]."""
        flat = [x.reshape(self.batch, -1, *x.shape[2:]) for x in (query, key, value)]
        self.kept.append((flat[1], flat[2]))
        q, k, v = (x.transpose(1, 2) for x in flat)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return seen.transpose(1, 2).reshape(query.shape)


class NextBlock:
    """A block >= 2 at chosen rows, each started from position `cut` of the block before.

    Args:
        before: the block whose position `cut` each start continues.
        source: [B, R] int64, which of that block's rows each of the R starts continues.
        cut: 1..K; positions 1..cut of that block lie on the path.
        block_size: K.
    """

    def __init__(self, before: FirstBlock | NextBlock, source: Tensor, cut: int, block_size: int):
        self.before, self.source, self.cut, self.block_size = before, source, cut, block_size
        if isinstance(before, FirstBlock):
            self.first, self.row, self.reach = before, source, cut
        else:
            self.first = before.first
            self.row = before.row.gather(1, source)  # [B, R], row of block 1
            self.reach = before.reach  # positions of the row's own block 1 on the path
        self.kept: list[tuple[Tensor, Tensor]] = []  # per layer, [B, R, P, nkv, D] each
        self._mask: Tensor | None = None

    def _path(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values of the blocks strictly between block 1 and this one, on the path."""
        if isinstance(self.before, FirstBlock):
            return None, None
        on_path = self.before.kept[layer][0].shape[2] - self.block_size + self.cut
        batch = torch.arange(self.source.shape[0], device=self.source.device)[:, None]
        key, value = (kept[batch, self.source, :on_path] for kept in self.before.kept[layer])
        return key, value

    def _visible(self, prefix: int, own: int) -> Tensor:
        """[B, 1, R·K, prefix + R·own] bool: block 1's flat entries, then every start's own."""
        if self._mask is None:
            (batch, starts), block = self.row.shape, self.block_size
            device = self.row.device
            limit = (self.row * block + self.reach)[:, :, None, None]
            seen = (torch.arange(prefix, device=device) < limit).expand(-1, -1, block, -1)
            inside = torch.ones(block, own, dtype=torch.bool, device=device).tril(own - block)
            mine = torch.eye(starts, dtype=torch.bool, device=device)[:, None, :, None]
            mine = (mine & inside[None, :, None, :]).reshape(1, starts, block, starts * own)
            mask = torch.cat([seen, mine.expand(batch, -1, -1, -1)], dim=-1)
            self._mask = mask.reshape(batch, 1, starts * block, prefix + starts * own)
        return self._mask

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B·R, K, nh, D], key and value [B·R, K, nkv, D] -> [B·R, K, nh, D]."""
        batch, starts = self.row.shape
        own = []
        for between, mine in zip(self._path(layer), (key, value)):
            mine = mine.reshape(batch, starts, *mine.shape[1:])
            own.append(mine if between is None else torch.cat([between, mine], dim=2))
        self.kept.append((own[0], own[1]))
        prefix = self.first.kept[layer]
        k, v = (torch.cat([p, o.flatten(1, 2)], 1).transpose(1, 2) for p, o in zip(prefix, own))
        q = query.reshape(batch, -1, *query.shape[2:]).transpose(1, 2)
        mask = self._visible(prefix[0].shape[1], own[0].shape[2])
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return seen.transpose(1, 2).reshape(query.shape)
