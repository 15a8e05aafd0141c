"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858), level by level, for R texts at once.

Each level's forward runs the best nodes of the level before, and the best N of all candidates are
the tree. Shapes are fixed by `LevelLimits`; no value is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_specblock.candidates import NEVER, select_nodes, tree_of
from vllm_specblock.drafters.common.layers import Attend
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.options import Eagle3Config
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.grow_level import GrowingLevels, LevelLimits, NextRows
from vllm_specblock.triton_kernels.tree.select_tree import MOST_CANDIDATES

_DEPTH, _NODES_PER_LEVEL = 8, 4  # defaults, see `Eagle3Config.depth`


def limits_of(
    options: Eagle3Config, num_nodes: int, lookahead: int, draft_vocab_size: int
) -> LevelLimits:
    """Return the limits of `options`, within the slots and the draft vocabulary."""
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
    """Return the trees under the newest committed rows' tokens.

    Args:
        embed: [n] target ids -> [n, H].
        state: [R, H], the drafter's at those rows.
        position: [R] int64, their RoPE position; a row of level d is d − 1 further.
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
    """Candidates of all levels so far, as in `GrowingLevels`.

    Candidate 0 is the root. Drafted row 0 is the newest committed one, and rows 1 + (d − 2)·width
    … of level d ≥ 2 follow.
    """

    def __init__(self, growth: LevelLimits, position: Tensor) -> None:
        self.growth, self.position = growth, position
        shape, device = (len(position), growth.candidates - 1), position.device
        self.token, self.parent = torch.zeros(2, *shape, dtype=torch.int64, device=device)
        self.score = torch.empty(shape, device=device)
        self.depth = torch.empty(shape[1], dtype=torch.int64, device=device)
        self.level = self.count = 0

    def attach(
        self, rows: NextRows | None, there: Tensor | None, logprob: Tensor, token: Tensor
    ) -> NextRows | DraftTree:
        """Hang a level under the rows that drafted it; see `GrowingLevels.attach`."""
        growth, self.level = self.growth, self.level + 1
        new = slice(self.count, self.count + token[0].numel())
        # Rounding may leave a certain token's log-probability above 0; a child's score must
        # not pass its parent's.
        score = logprob.clamp(max=0)
        if rows is not None:
            valid = rows.valid if there is None else rows.valid & there
            of_row = torch.where(valid, self.score.gather(1, rows.node - 1), NEVER)
            score = of_row[..., None] + score
            self.parent[:, new] = rows.node.repeat_interleave(growth.top_k, 1)
        self.token[:, new], self.score[:, new] = token.flatten(1), score.flatten(1)
        self.depth[new], before, self.count = self.level, self.count, new.stop
        if self.level == growth.depth:
            found = self.token, self.parent, self.score, self.depth[None]
            return select_nodes(*found, None, growth.budget, growth.depth)
        # The best nodes of this level; of equals the earlier first.
        order = self.score[:, new].sort(dim=1, descending=True, stable=True)
        score, index = (part[:, : growth.width] for part in order)
        row, request = index // growth.top_k, torch.arange(len(index), device=index.device)
        return NextRows(
            node=1 + before + index,
            token=self.token[:, new].gather(1, index),
            row=row if rows is None else 1 + (self.level - 2) * growth.width + row,
            position=torch.zeros_like(row),
            valid=score > NEVER,
            behind=(request[:, None] * token.shape[1] + row).flatten(),
            rope=(self.position[:, None] + self.level).expand_as(index).flatten(),
        )
