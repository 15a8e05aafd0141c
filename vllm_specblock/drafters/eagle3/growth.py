"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858), level by level, for R texts at once.

Every level's forward runs the best nodes of the level before, and each gives its best tokens. Of
all candidates the best N are the tree. Shapes are fixed by `DynamicTreeConfig`; no value is read on
the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_specblock.candidates import NEVER, select_nodes, tree_of
from vllm_specblock.config import Eagle3Config
from vllm_specblock.drafters.eagle3.model import AttendInLayer, Eagle3Model
from vllm_specblock.drafters.specblock.tree_shape import Starts
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.grow_level import GrowingLevels, LevelLimits
from vllm_specblock.triton_kernels.tree.select_tree import MOST_CANDIDATES

_DEPTH, _NODES_PER_LEVEL = 8, 4
"""Default depth of a tree, and nodes for each of its levels, see `Eagle3Config.depth`."""


@dataclass(frozen=True)
class DynamicTreeConfig:
    """How a tree grows.

    Attributes:
        depth: drafter forwards, and tokens on the longest path.
        top_k: children of a node that grows, and nodes of a level that may grow.
        budget: N, nodes of the tree.
        lookahead: cache slots that rows of level 2 and later may take; None: as many as they like.
    """

    depth: int
    top_k: int
    budget: int
    lookahead: int | None = None

    @classmethod
    def of(
        cls, options: Eagle3Config, num_nodes: int, lookahead: int, draft_vocab_size: int
    ) -> DynamicTreeConfig:
        """What `options` ask for, as far as the slots and the draft vocabulary go."""
        wanted = options.depth or min(_DEPTH, max(2, num_nodes // _NODES_PER_LEVEL))
        # Every level after the first borrows one reserved slot at least.
        depth = min(wanted, num_nodes, lookahead + 1)
        return cls(depth, options.top_k, num_nodes, lookahead).within(draft_vocab_size)

    @property
    def width(self) -> int:
        """Nodes of a level that grow: rows of every forward after the first."""
        if self.lookahead is None:
            return self.top_k
        return max(1, min(self.top_k, self.lookahead // max(1, self.depth - 1)))

    @property
    def limits(self) -> LevelLimits:
        return LevelLimits(self.depth, self.top_k, self.width, self.budget)

    def within(self, draft_vocab_size: int) -> DynamicTreeConfig:
        """The same for a drafter that can name only so many tokens."""
        return replace(self, top_k=min(self.top_k, draft_vocab_size))


AttentionBuilder = Callable[[int, Starts], tuple[AttendInLayer, torch.Tensor | None]]
"""sight(level, rows) -> what the rows of level ≥ 2 attend with, and [R, width] bool: which of them
have a place in the cache at all (None: all)."""


@dataclass(frozen=True)
class LevelRows(Starts):
    """The rows of a level: nodes that grow, and what the drafter needs to run them.

    Attributes:
        behind: [R · width] int64, of all texts' rows of the last forward the one that each follows.
        rope: [R · width] int64, its RoPE position.
    """

    behind: torch.Tensor
    rope: torch.Tensor


def grow(
    drafter: Eagle3Model,
    embed: Callable[[torch.Tensor], torch.Tensor],
    growth: DynamicTreeConfig,
    state: torch.Tensor,
    position: torch.Tensor,
    attention_builder: AttentionBuilder,
    beta: torch.Tensor | None = None,
) -> DraftTree:
    """The trees under the tokens that the newest committed rows have embedded.

    Args:
        embed: [n] target ids -> [n, H].
        state: [R, H], what the drafter left at those rows.
        position: [R] int64, their RoPE position. A row of level d stands d − 1 further.
        calibration: [R] fp32, see `feedback/calibration.py`; None: 1.
    """
    levels = levels_for(growth, position)
    logprob, token = drafter.best(state, growth.top_k, beta)
    levels.first(logprob, token)
    for level in range(2, growth.depth + 1):
        rows = levels.starts()
        attend, there = attention_builder(level, rows)
        feature = drafter.carry(state[rows.behind])
        state = drafter.run(embed(rows.token.flatten()), feature, rows.rope, attend)
        of_requests = state.view(len(position), growth.width, -1)
        logprob, token = drafter.best(of_requests, growth.top_k, beta)
        levels.next(rows, there, logprob, token)
    return levels.finish()


def levels_for(growth: DynamicTreeConfig, position: torch.Tensor) -> Levels | FusedLevels:
    """Levels where `position` lies: on a GPU one launch per level, if C is not too large."""
    fused = position.is_cuda and growth.limits.candidates <= MOST_CANDIDATES
    return (FusedLevels if fused else Levels)(growth, position)


class Levels:
    """Candidates of all levels so far; `first`, then `starts` and `next` per level, `finish`.

    Candidate 0 is the root. Drafted row 0 is the newest committed one, and rows 1 + (d − 2)·width
    … of level d ≥ 2 follow.

    Attributes:
        first_row: first row of the newest level.

    Args:
        position: [R] int64, RoPE position of the rows of level 1.
    """

    def __init__(self, growth: DynamicTreeConfig, position: torch.Tensor) -> None:
        self.growth, self.position = growth, position
        self.first_row, self.before = 0, 0
        self.token: list[torch.Tensor] = []  # per level [R, candidates]
        self.score: list[torch.Tensor] = []
        self.parent: list[torch.Tensor] = []

    def first(self, logprob: torch.Tensor, token: torch.Tensor) -> None:
        """Hang level 1 under the root: logprob [R, k] float32, best first, token [R, k] int64."""
        self._add(token, logprob.clamp(max=0), torch.zeros_like(token))

    def starts(self) -> LevelRows:
        """The best nodes of the newest level, [R, width]; of equals the earlier first."""
        order = self.score[-1].sort(dim=1, descending=True, stable=True)
        score, index = (part[:, : self.growth.width] for part in order)
        row = index // self.growth.top_k
        rows = self.score[-1].shape[1] // self.growth.top_k
        request = torch.arange(len(index), device=index.device)
        return LevelRows(
            node=1 + self.before + index,
            token=self.token[-1].gather(1, index),
            row=self.first_row + row,
            position=torch.zeros_like(row),
            valid=score > NEVER,
            behind=(request[:, None] * rows + row).flatten(),
            rope=(self.position[:, None] + len(self.token)).expand_as(index).flatten(),
        )

    def next(
        self,
        rows: Starts,
        there: torch.Tensor | None,
        logprob: torch.Tensor,
        token: torch.Tensor,
    ) -> None:
        """Hang a level under `rows`, as far as they are `there`.

        there: [R, width] bool, or None: all; logprob and token: [R, width, k].
        """
        valid = rows.valid if there is None else rows.valid & there
        of_row = self.score[-1].gather(1, rows.node - 1 - self.before)
        of_row = torch.where(valid, of_row, NEVER)[..., None]
        # Rounding may leave a certain token's log-probability above 0; a child's score must
        # not pass its parent's.
        score = of_row + logprob.clamp(max=0)
        self.before += self.token[-1].shape[1]
        self.first_row += 1 if len(self.token) == 1 else self.growth.width
        self._add(
            token.flatten(1), score.flatten(1), rows.node[..., None].expand_as(token).flatten(1)
        )

    def finish(self) -> DraftTree:
        """The best N candidates, in order."""
        depth = [
            torch.full_like(token[:1], level) for level, token in enumerate(self.token, start=1)
        ]
        return select_nodes(
            torch.cat(self.token, 1),
            torch.cat(self.parent, 1),
            torch.cat(self.score, 1),
            torch.cat(depth, 1),
            None,
            self.growth.budget,
            self.growth.depth,
        ).tree

    def _add(self, token: torch.Tensor, score: torch.Tensor, parent: torch.Tensor) -> None:
        self.token.append(token)
        self.score.append(score)
        self.parent.append(parent)


class FusedLevels:
    """`Levels` as one launch per level, which also does what follows the level.

    The same calls with the same results, in this order. Arguments as there.
    """

    def __init__(self, growth: DynamicTreeConfig, position: torch.Tensor) -> None:
        self.growing = GrowingLevels(growth.limits, position)

    def first(self, logprob: torch.Tensor, token: torch.Tensor) -> None:
        self.grown = self.growing.attach_level(None, None, None, logprob[:, None], token[:, None])

    def starts(self) -> LevelRows:
        return LevelRows(*self.grown)

    def next(
        self,
        rows: Starts,
        there: torch.Tensor | None,
        logprob: torch.Tensor,
        token: torch.Tensor,
    ) -> None:
        self.grown = self.growing.attach_level(rows.node, rows.valid, there, logprob, token)

    def finish(self) -> DraftTree:
        return tree_of(self.grown)
