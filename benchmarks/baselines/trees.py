"""Trees of drafters whose positions do not depend on each other, and trees of a fixed shape.

Both take the best N paths by a product over positions: of the drafter's own probabilities
(`independent_tree`), or of hit rates measured beforehand (`static_tree`), as the static trees of
Medusa (arXiv 2401.10774, appendix) and Falcon (arXiv 2412.12639) are built.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.tree import DraftTree


def independent_tree(top_logprob: Tensor, top_token: Tensor, budget: int) -> DraftTree:
    """The `budget` most probable paths when position k's token is drawn whatever came before.

    Reads the device.

    Args:
        top_logprob: [K, B] fp32, log-probabilities of each position's choices, in nats.
        top_token: [K, B] int64, their target ids, different ones within a position.

    Returns:
        One tree of `budget` slots, exact among the given choices; ties go to the lower depth.
    """
    nodes = _best_paths(top_logprob.tolist(), budget)
    choices = top_token.tolist()
    depth = [0]
    for parent, _, _ in nodes:
        depth.append(depth[parent] + 1)
    free = budget - len(nodes)
    device = top_token.device
    token = [choices[at - 1][rank] for at, (_, rank, _) in zip(depth[1:], nodes)]
    return DraftTree.from_nodes(
        torch.tensor([token + [0] * free], device=device),
        torch.tensor([[node[0] for node in nodes] + [-1] * free], device=device).int(),
        torch.tensor([[node[2] for node in nodes] + [-math.inf] * free], device=device),
        torch.tensor([len(nodes)], device=device).int(),
        len(top_logprob),
    )


def static_tree(hit: Tensor, budget: int) -> tuple[list[int], list[int]]:
    """The tree of at most `budget` nodes whose expected accepted length is the largest.

    Args:
        hit: [K, B], how often position k's choice of rank b is right, its prefix being right.

    Returns:
        parents and ranks, one each per node, parents first: the node of its parent (0 = root,
        i + 1 = the i-th entry), and which choice of its position it takes.
    """
    nodes = _best_paths(hit.double().log().tolist(), budget)
    return [node[0] for node in nodes], [node[1] for node in nodes]


def default_hits(positions: int, width: int) -> Tensor:
    """Hit rates [positions, width] to shape a tree by where none were measured.

    The first choice of position 1 is right in 70 % of cases and a tenth less at every further
    position; each further choice takes two fifths of what those before it left over.
    """
    first = 0.7 * 0.9 ** torch.arange(positions, dtype=torch.float64)
    later = 0.4 * 0.6 ** torch.arange(width - 1, dtype=torch.float64)
    return torch.cat([first[:, None], (1 - first)[:, None] * later], dim=1)


def _best_paths(score: list[list[float]], budget: int) -> list[tuple[int, int, float]]:
    """The `budget` paths of the largest sum of scores (none above 0), as (parent, rank, sum).

    A path's children score no more than itself and wait until it is taken; so does the next
    choice beside it. What the heap hands out next is therefore the best of all that is left.
    """
    order = [sorted(range(len(row)), key=lambda rank: -row[rank]) for row in score]
    serial = itertools.count()
    heap: list[tuple] = []

    def offer(depth: int, slot: int, parent: int, before: float) -> None:
        if depth < len(order) and slot < len(order[depth]):
            total = before + score[depth][order[depth][slot]]
            if total > -math.inf:
                heapq.heappush(heap, (-total, depth, next(serial), slot, parent, before))

    nodes: list[tuple[int, int, float]] = []
    offer(0, 0, 0, 0.0)
    while heap and len(nodes) < budget:
        negative, depth, _, slot, parent, before = heapq.heappop(heap)
        nodes.append((parent, order[depth][slot], -negative))
        offer(depth, slot + 1, parent, before)
        offer(depth + 1, 0, len(nodes), -negative)
    return nodes


class PlanStep(NamedTuple):
    """What one forward of a static tree adds. S starts, the nodes whose block it drafts; n nodes.

    source: [S] int64, which start of the step before each start descends from.
    path: [S, k] int64, the nodes (0-based) of the last k depths of each start's path.
    node: [n] int64, the nodes that the step adds; start, offset, rank: [n] int64 each, the start
        that a node descends from, its 0-based position in the block, and which choice it is.
    """

    source: Tensor
    path: Tensor
    node: Tensor
    start: Tensor
    offset: Tensor
    rank: Tensor


class TreePlan:
    """A static tree, cut into forwards of k positions each.

    Args:
        parents, ranks: as `static_tree` returns them.
        block: k.
        device: of the index tensors.
    """

    def __init__(
        self, parents: list[int], ranks: list[int], block: int, device: torch.device | str = "cpu"
    ):
        self.count = len(parents)
        self.parent = torch.tensor(parents, device=device)
        paths: list[list[int]] = [[]]  # per node, 0-based nodes from depth 1 to itself
        for node, parent in enumerate(parents):
            paths.append([*paths[parent], node])
        depth = [len(path) for path in paths[1:]]
        self.levels = [
            torch.tensor([n for n in range(self.count) if depth[n] == d], device=device)
            for d in range(1, max(depth) + 1)
        ]
        self.steps: list[PlanStep] = []
        before: list[list[int]] = [[]]
        for done in range(0, max(depth), block):
            nodes = [n for n in range(self.count) if done < depth[n] <= done + block]
            starts = sorted({tuple(paths[n + 1][:done]) for n in nodes})
            before_starts = before
            before = [list(path) for path in starts]
            columns = (
                [before_starts.index(path[: done - block]) if done else 0 for path in before],
                [path[done - block :] for path in before],
                nodes,
                [starts.index(tuple(paths[n + 1][:done])) for n in nodes],
                [depth[n] - done - 1 for n in nodes],
                [ranks[n] for n in nodes],
            )
            self.steps.append(PlanStep(*(torch.tensor(c, device=device).long() for c in columns)))

    def tree(self, token: Tensor, logprob: Tensor) -> DraftTree:
        """The tree whose nodes have these tokens and log-probabilities given their parents, [N]
        each, in the plan's order."""
        total = logprob.new_zeros(self.count + 1)
        for level in self.levels:
            total[level + 1] = total[self.parent[level]] + logprob[level]
        # Stable, and the plan has parents first: no child that scores the same overtakes.
        score, order = total[1:].sort(descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(self.count, device=order.device)
        parent = pad(place + 1, (1, 0))[self.parent[order]]
        size = torch.tensor([self.count], device=order.device).int()
        return DraftTree.from_nodes(
            token[order][None], parent[None].int(), score[None], size, len(self.levels)
        )
