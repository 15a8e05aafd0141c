"""EAGLE-3's trees along one text, with a dense cache in place of a paged one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_specblock.draft.eagle3.growth import grow
from vllm_specblock.draft.expand import Starts
from vllm_specblock.train.learner import Script
from vllm_specblock.tree import DraftTree

if TYPE_CHECKING:
    from baselines.eagle3 import Eagle3


class Along:
    """Drafts along one text: catch up on the committed rows, then grow a tree from the newest."""

    def __init__(self, learner: Eagle3, script: Script):
        self.learner, self.script = learner, script
        self.sight = CachedSight(learner)

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        state = self._catch_up(root)
        self.sight.begin()
        newest = torch.full((1,), root - 1, device=state.device)
        tree = grow(
            self.learner, self.script.embed, self.learner.growth, state, newest, self.sight.level
        )
        self.sight.cut(root)
        return tree

    def _catch_up(self, root: int) -> Tensor:
        """Run the committed rows that were not yet, at least the newest one: its state [1, H]."""
        self.sight.cut(min(len(self.sight.key), root - 1))
        row = torch.arange(len(self.sight.key), root, device=self.script.tokens.device)
        self.sight.mask = torch.arange(root, device=row.device) <= row[:, None]
        embedding = self.script.embed(self.script.tokens[row + 1])
        feature = self.learner.fuse(self.script.hidden[row])
        return self.learner.run(embedding, feature, row, self.sight)[-1:]


class CachedSight:
    """`attend` over one text's rows so far and new ones.

    Attributes:
        key, value: [n, nkv, D].
        mask: [new, n + new] bool, to be set before each forward.
    """

    def __init__(self, learner: Eagle3):
        weight, shape = learner.fc.weight, learner.config
        sizes = (0, shape.num_key_value_heads, shape.head_dim)
        self.key = torch.empty(sizes, dtype=weight.dtype, device=weight.device)
        self.value, self.mask = torch.empty_like(self.key), None

    def cut(self, rows: int) -> None:
        """Forget all but the first `rows`."""
        self.key, self.value = self.key[:rows], self.value[:rows]

    def begin(self) -> None:
        """From here on, rows of levels: they see what is there now, and their ancestors."""
        self.committed = len(self.key)
        # Drafted row 0 is the newest committed one, and hides nothing from those below it.
        self.path = torch.zeros(1, 0, dtype=torch.bool, device=self.key.device)

    def level(self, _level: int, rows: Starts) -> tuple[CachedSight, None]:
        """Set the mask for `rows` ([1, width]) of the next level."""
        row = rows.row[0]
        own = torch.eye(len(row), dtype=torch.bool, device=row.device)
        path = torch.cat([self.path[row], own], dim=1)
        self.path = torch.cat([F.pad(self.path, (0, len(row))), path])
        self.mask = F.pad(path, (self.committed, 0), value=True)
        return self, None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key = torch.cat([self.key.to(key.dtype), key])
        self.value = torch.cat([self.value.to(value.dtype), value])
        return masked_attention(query[None], self.key[None], self.value[None], self.mask[None])[0]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query [B, Q, nh, D], key and value [B, T, nkv, D], mask [B, Q, T] bool -> [B, Q, nh, D]."""
    # Repeated by hand: fused kernels that take a mask know no groups.
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
    return mixed.transpose(1, 2)
