"""Trees of drafters whose positions do not depend on each other, for R requests at once.

A path's probability is the product of its tokens' at their positions, and the tree is
the best N paths. No value is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.candidates import select_nodes
from vllm_specblock.tree import DraftTree


class ProductTrees:
    """Finds the best N paths, exactly among the choices given.

    With parents and choices from best to worst, child j of parent i is no better than the i·j − 1
    others of numbers up to i and j: only those with i·j ≤ N can be among the best N. Ties go to
    the lower depth.

    Args:
        positions: K.
        width: B, choices per position.
        budget: N.
        device: where all of it lies.
    """

    def __init__(self, positions: int, width: int, budget: int, device: torch.device | str) -> None:
        self.width, self.budget, self.max_depth = min(width, budget), budget, positions
        self.levels: list[tuple[Tensor, Tensor, int]] = []  # parent, choice [P] int64; kept
        count = self.width
        depth = [1] * count
        for level in range(2, positions + 1):
            pairs = [
                (parent, choice)
                for parent in range(count)
                for choice in range(min(self.width, budget // (parent + 1)))
            ]
            count = min(budget, len(pairs))
            index = torch.tensor(pairs, device=device).T
            self.levels.append((index[0], index[1], count))
            depth += [level] * count
        self.depth = torch.tensor([depth], device=device)  # [1, C]

    def grow(self, logprob: Tensor, token: Tensor) -> DraftTree:
        """R trees of N slots.

        Args:
            logprob: [R, K, ≥ B] float32, of each position's choices, descending, in nats; −inf:
                no choice.
            token: [R, K, ≥ B] int64, their target ids, different ones within a position.
        """
        logprob = logprob[..., : self.width].clamp(max=0)
        best = logprob[:, 0]  # [R, kept], descending
        tokens, scores, parents = [token[:, 0, : self.width]], [best], []
        first = 1  # of the level before, among the candidates; 0 is the root
        for at, (parent, choice, count) in enumerate(self.levels, start=1):
            found = (best[:, parent] + logprob[:, at, choice]).topk(count)
            parents.append(parent[found.indices] + first)
            tokens.append(token[:, at].gather(1, choice[found.indices]))
            first += best.shape[1]
            best = found.values
            scores.append(best)
        parent = torch.cat(parents, 1) if parents else best.new_zeros(len(best), 0).long()
        return select_nodes(
            torch.cat(tokens, 1),
            pad(parent, (self.width, 0)),
            torch.cat(scores, 1),
            self.depth,
            None,
            self.budget,
            self.max_depth,
        ).tree
