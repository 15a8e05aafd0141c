"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858), grown for one text at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from baselines.eagle3_layer import Sizes, masked_attention
from torch import Tensor

from vllm_specblock.train.learner import Script
from vllm_specblock.tree import DraftTree

if TYPE_CHECKING:
    from baselines.eagle3 import Eagle3


@dataclass(frozen=True)
class Growth:
    """How a tree grows: `depth` drafter forwards, each over the `width` best nodes of the last
    level, each with its `width` best tokens; of all these the best `budget` are kept."""

    depth: int = 7
    width: int = 10
    budget: int = 60

    @classmethod
    def chain(cls, depth: int) -> Growth:
        """No tree: the best token after the best token."""
        return cls(depth, 1, depth)


class Along:
    """Drafts along one text: catch up on the committed rows, then grow a tree from the newest."""

    def __init__(self, learner: Eagle3, script: Script, growth: Growth):
        self.learner, self.script, self.growth = learner, script, growth
        weight = learner.fc.weight
        self.sight = CachedSight(learner.sizes, weight.dtype, weight.device)

    @torch.no_grad()
    def __call__(self, root: int) -> DraftTree:
        state = self._catch_up(root)
        levels = [self._first_level(state)]
        ancestors = torch.zeros(1, 0, dtype=torch.bool, device=state.device)
        for depth in range(1, self.growth.depth):
            level, state, ancestors = self._next_level(levels, state, ancestors, root, depth)
            levels.append(level)
        self.sight.cut(root)
        return _best_nodes(levels, self.growth)

    def _catch_up(self, root: int) -> Tensor:
        """Run the committed rows that were not yet, at least the newest one: its state [1, H]."""
        self.sight.cut(min(len(self.sight.key), root - 1))
        row = torch.arange(len(self.sight.key), root, device=self.script.tokens.device)
        self.sight.mask = torch.arange(root, device=row.device) <= row[:, None]
        embedding = self.script.embed(self.script.tokens[row + 1])
        feature = self.learner.fuse(self.script.hidden[row])
        return self.learner.run(embedding, feature, row, self.sight)[-1:]

    def _first_level(self, state: Tensor) -> Level:
        score, token = self.learner.best(state, self.growth.width)
        parent = torch.full_like(token[0], -1)
        return Level(token[0], score[0], parent, torch.zeros_like(parent))

    def _next_level(
        self, levels: list[Level], state: Tensor, ancestors: Tensor, root: int, depth: int
    ) -> tuple[Level, Tensor, Tensor]:
        """Expand the best nodes at `depth`.

        state [rows, H] and ancestors [rows, drafted rows] bool are those of the forward that
        proposed them; returned are the new level and its own two.
        """
        level = levels[-1]
        width = min(self.growth.width, len(level.score))
        chosen = level.score.topk(width).indices  # into the level
        row = level.row[chosen]
        own = torch.eye(width, dtype=torch.bool, device=row.device)
        ancestors = torch.cat([ancestors[row], own], dim=1)
        committed = own.new_ones(width, root)
        self.sight.mask = torch.cat([committed, ancestors], dim=1)
        position = torch.full_like(chosen, root - 1 + depth)
        embedding = self.script.embed(level.token[chosen])
        state = self.learner.run(embedding, state[row], position, self.sight)
        logprob, token = self.learner.best(state, self.growth.width)
        before = sum(len(earlier.score) for earlier in levels[:-1])
        children = (before + chosen)[:, None].expand_as(token)
        of_row = torch.arange(width, device=row.device)[:, None].expand_as(token)
        score = level.score[chosen][:, None] + logprob
        new = Level(token.flatten(), score.flatten(), children.flatten(), of_row.flatten())
        return new, state, ancestors


class CachedSight:
    """`attend` over one text's rows so far and new ones.

    Attributes:
        key, value: [n, nkv, D].
        mask: [new, n + new] bool, to be set before each forward.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device):
        shape = (0, sizes.num_key_value_heads, sizes.head_dim)
        self.key = torch.empty(shape, dtype=dtype, device=device)
        self.value, self.mask = torch.empty_like(self.key), None

    def cut(self, rows: int) -> None:
        """Forget all but the first `rows`."""
        self.key, self.value = self.key[:rows], self.value[:rows]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key = torch.cat([self.key.to(key.dtype), key])
        self.value = torch.cat([self.value.to(value.dtype), value])
        return masked_attention(query[None], self.key[None], self.value[None], self.mask[None])[0]


@dataclass(frozen=True)
class Level:
    """Candidates of one depth, each [n].

    Attributes:
        token: target ids.
        score: cumulative log-probability.
        parent: number of the parent among all candidates, level after level; −1: the root.
        row: which row of the forward that proposed them.
    """

    token: Tensor
    score: Tensor
    parent: Tensor
    row: Tensor


def _best_nodes(levels: list[Level], growth: Growth) -> DraftTree:
    """The best candidates of all levels as a tree. Closed under parents: a child never scores
    above its parent, and of equals the stable sort keeps the shallower one first."""
    token, score, parent = (
        torch.cat([getattr(level, name) for level in levels])
        for name in ("token", "score", "parent")
    )
    order = score.sort(descending=True, stable=True).indices[: growth.budget]
    # By number of the candidate; the root is −1, and so the last entry.
    node = torch.zeros(len(score) + 1, dtype=torch.int32, device=score.device)
    node[order] = torch.arange(1, len(order) + 1, dtype=torch.int32, device=score.device)
    spare = (0, growth.budget - len(order))
    return DraftTree.from_nodes(
        F.pad(token[order], spare)[None],
        F.pad(node[parent[order]], spare, value=-1)[None],
        F.pad(score[order], spare, value=float("-inf"))[None],
        torch.tensor([len(order)], dtype=torch.int32, device=score.device),
        growth.depth,
    )
