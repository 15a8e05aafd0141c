"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858), level by level, for R texts at once.

Every level's forward runs the best nodes of the level before, and each gives its best tokens. Of
all candidates the best N are the tree. Shapes are fixed by `LevelLimits`; no value is read on the
host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_specblock.candidates import NEVER, select_nodes, tree_of
from vllm_specblock.config import Eagle3Config
from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.grow_level import (
    GrowingLevels,
    LevelLimits,
    NextRows,
)
from vllm_specblock.triton_kernels.tree.select_tree import MOST_CANDIDATES

_DEPTH, _NODES_PER_LEVEL = 8, 4
"""Default depth of a tree, and nodes for each of its levels, see `Eagle3Config.depth`."""


def limits_of(
    options: Eagle3Config, num_nodes: int, lookahead: int, draft_vocab_size: int
) -> LevelLimits:
    """The growth that `options` ask for, as far as the slots and the draft vocabulary go."""
    wanted = options.depth or min(_DEPTH, max(2, num_nodes // _NODES_PER_LEVEL))
    # Every row of level 2 and later borrows one reserved slot.
    depth = min(wanted, num_nodes, lookahead + 1)
    top_k = min(options.top_k, draft_vocab_size)
    width = max(1, min(top_k, lookahead // max(1, depth - 1)))
    return LevelLimits(depth, top_k, width, num_nodes)


def grow(
    drafter: Eagle3Model,
    embed: Callable[[Tensor], Tensor],
    growth: LevelLimits,
    state: Tensor,
    position: Tensor,
    attention: Callable[[int, NextRows], tuple[Attend, Tensor | None]],
    beta: Tensor | None = None,
) -> DraftTree:
    """The trees under the tokens that the newest committed rows have embedded.

    Args:
        embed: [n] target ids -> [n, H].
        state: [R, H], what the drafter left at those rows.
        position: [R] int64, their RoPE position. A row of level d stands d − 1 further.
        attention: (level, its rows) -> their attention, and [R, width] bool: which of them have a
            slot in the cache (None: all).
        beta: [R] fp32, see `feedback/calibration.py`; None: 1.
    """
    fused = position.is_cuda and growth.candidates <= MOST_CANDIDATES
    levels: GrowingLevels | Levels = (GrowingLevels if fused else Levels)(growth, position)
    grown = levels.attach(None, None, *drafter.best(state[:, None], growth.top_k, beta))
    level = 1
    while isinstance(grown, NextRows):
        level += 1
        attend, there = attention(level, grown)
        feature = drafter.carry(state[grown.behind])
        state = drafter.run(embed(grown.token.flatten()), feature, grown.rope, attend)
        of_requests = state.view(len(position), growth.width, -1)
        grown = levels.attach(grown, there, *drafter.best(of_requests, growth.top_k, beta))
    return grown if isinstance(grown, DraftTree) else tree_of(grown)


class Levels:
    """Candidates of all levels so far.

    Candidate 0 is the root. Drafted row 0 is the newest committed one, and rows 1 + (d − 2)·width
    … of level d ≥ 2 follow.

    Args:
        position: [R] int64, RoPE position of the rows of level 1.
    """

    def __init__(self, growth: LevelLimits, position: Tensor) -> None:
        self.growth, self.position = growth, position
        self.token: list[Tensor] = []  # per level [R, candidates]
        self.score: list[Tensor] = []
        self.parent: list[Tensor] = []

    def attach(
        self, rows: NextRows | None, there: Tensor | None, logprob: Tensor, token: Tensor
    ) -> NextRows | DraftTree:
        """Hang a level under the rows that drafted it; return the next rows, or at last the trees.

        Args:
            rows: what the last call returned; None in level 1, which starts at the root.
            there: [R, rows] bool, rows that had a slot in the cache; None: all.
            logprob, token: [R, rows, k] float32, best first, and int64.
        """
        # Rounding may leave a certain token's log-probability above 0; a child's score must
        # not pass its parent's.
        score, parent = logprob.clamp(max=0), torch.zeros_like(token)
        if rows is not None:
            valid = rows.valid if there is None else rows.valid & there
            of_row = self.score[-1].gather(1, rows.node - 1 - self._before)
            score = torch.where(valid, of_row, NEVER)[..., None] + score
            parent = rows.node[..., None].expand_as(token)
        for kept, level in zip((self.token, self.score, self.parent), (token, score, parent)):
            kept.append(level.flatten(1))
        return self._starts() if len(self.token) < self.growth.depth else self._tree()

    @property
    def _before(self) -> int:
        """Candidates before the newest level."""
        return sum(level.shape[1] for level in self.token[:-1])

    def _starts(self) -> NextRows:
        """The best nodes of the newest level, [R, width]; of equals the earlier first."""
        order = self.score[-1].sort(dim=1, descending=True, stable=True)
        score, index = (part[:, : self.growth.width] for part in order)
        row, level = index // self.growth.top_k, len(self.token)
        rows = self.score[-1].shape[1] // self.growth.top_k
        request = torch.arange(len(index), device=index.device)
        return NextRows(
            node=1 + self._before + index,
            token=self.token[-1].gather(1, index),
            row=row if level == 1 else 1 + (level - 2) * self.growth.width + row,
            position=torch.zeros_like(row),
            valid=score > NEVER,
            behind=(request[:, None] * rows + row).flatten(),
            rope=(self.position[:, None] + level).expand_as(index).flatten(),
        )

    def _tree(self) -> DraftTree:
        """The best N candidates, in order."""
        token = torch.cat(self.token, 1)
        depth = [torch.full_like(each[:1], d) for d, each in enumerate(self.token, start=1)]
        limits = self.growth.budget, self.growth.depth
        parent, score = torch.cat(self.parent, 1), torch.cat(self.score, 1)
        return select_nodes(token, parent, score, torch.cat(depth, 1), None, *limits).tree
