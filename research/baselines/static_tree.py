"""Trees of a fixed shape, as in Medusa (arXiv 2401.10774, appendix) and Falcon (2412.12639): the
best N paths by a product of hit rates that were measured before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_specblock.candidates import select_nodes
from vllm_specblock.path_trees import PathTrees
from vllm_specblock.tree import DraftTree


def static_tree(hit: Tensor, budget: int) -> tuple[list[int], list[int]]:
    """Return the tree of at most `budget` nodes with the largest expected accepted length.

    hit: [K, B], how often position k's choice of rank b is right, given its prefix is.

    Returns:
        of each node, parents first: its parent (0: the root, i + 1: the i-th entry), and its rank.
    """
    rates = hit.cpu().sort(dim=1, descending=True)
    width, ranks = hit.shape[1], rates.indices[None]
    tree = PathTrees(len(hit), width, budget, "cpu").grow(rates.values.log().float()[None], ranks)
    count = int(tree.size[0])
    return tree.parent[0, :count].tolist(), tree.token[0, :count].tolist()


def default_hits(positions: int, width: int) -> Tensor:
    """Hit rates [positions, width] where none were measured: 70 % for the first choice of position
    1, a tenth less at each further one; a further choice takes two fifths of the rest."""
    first = 0.7 * 0.9 ** torch.arange(positions, dtype=torch.float64)
    later = 0.4 * 0.6 ** torch.arange(width - 1, dtype=torch.float64)
    return torch.cat([first[:, None], (1 - first)[:, None] * later], dim=1)


class PlanStep(NamedTuple):
    """One forward of a static tree. S starts, the nodes whose block it drafts; n nodes.

    ancestry: per start those of the later steps on its path, itself included, as numbers from
        `before` of step 2 on.
    """

    source: Tensor  # [S] int64, the start of the step before that each start descends from
    path: Tensor  # [S, k] int64, the nodes (0-based) of the last k depths of each start's path
    node: Tensor  # [n] int64, the nodes that the step adds
    place: Tensor  # [n] int64, each node's position among all S·k
    rank: Tensor  # [n] int64, its choice there
    width: int  # choices per position that the nodes take
    before: int  # starts of the later steps up to this one; the first step's is in the cache
    ancestry: list[list[int]]


class TreePlan:
    """A static tree, cut into forwards of k positions each.

    Args:
        parents, ranks: as `static_tree` returns them.
        block: k.
        device: of the index tensors.
    """

    def __init__(
        self, parents: list[int], ranks: list[int], block: int, device: torch.device | str = "cpu"
    ) -> None:
        self.count = len(parents)
        self.parent = torch.tensor(parents, device=device)
        paths: list[list[int]] = [[]]  # per node, 0-based nodes from depth 1 to itself
        for node, parent in enumerate(parents):
            paths.append([*paths[parent], node])
        depth = [len(path) for path in paths[1:]]
        self.max_depth = max(depth)
        self.depth = torch.tensor([depth], device=device)  # [1, count]
        self.levels = [
            torch.tensor([n for n in range(self.count) if depth[n] == d], device=device)
            for d in range(1, self.max_depth + 1)
        ]
        self.steps: list[PlanStep] = []
        self.starts = 0  # of all steps but the first
        starts: list[list[int]] = [[]]
        ancestry: list[list[int]] = [[]]
        for done in range(0, self.max_depth, block):
            nodes = [n for n in range(self.count) if done < depth[n] <= done + block]
            before = starts
            starts = [list(path) for path in sorted({tuple(paths[n + 1][:done]) for n in nodes})]
            source = [before.index(path[: done - block]) if done else 0 for path in starts]
            if done:
                ancestry = [[*ancestry[source[s]], self.starts + s] for s in range(len(starts))]
            place = [starts.index(paths[n + 1][:done]) * block + depth[n] - done - 1 for n in nodes]
            rank = [ranks[n] for n in nodes]
            columns = source, [path[done - block :] for path in starts], nodes, place, rank
            index = (torch.tensor(column, device=device).long() for column in columns)
            self.steps.append(PlanStep(*index, 1 + max(rank), self.starts, ancestry))
            self.starts += len(starts) if done else 0

    @classmethod
    def fitting(
        cls, hit: Tensor, budget: int, block: int, most_starts: int, device: torch.device | str
    ) -> TreePlan:
        """Return the largest plan of at most `budget` nodes and so many starts of later steps."""
        while True:
            plan = cls(*static_tree(hit, budget), block, device)
            if plan.starts <= most_starts:
                return plan
            budget -= 1

    def tree(self, token: Tensor, logprob: Tensor, budget: int) -> DraftTree:
        """R trees of `budget` slots, no fewer than the plan has nodes.

        Args:
            token: [R, count] int64, target ids in the plan's order.
            logprob: [R, count] float32, given their parents; −inf: not wanted, nor its children.
        """
        logprob = logprob.clamp(max=0)
        total = logprob.new_zeros(len(logprob), self.count + 1)
        for level in self.levels:
            total[:, level + 1] = total[:, self.parent[level]] + logprob[:, level]
        parent = self.parent.expand_as(token)
        scores, depth = total[:, 1:], self.depth
        return select_nodes(token, parent, scores, depth, budget, self.max_depth)
