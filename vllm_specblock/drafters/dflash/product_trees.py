"""Trees of drafters whose positions do not depend on each other, for R requests at once.

A path's probability is the product of its tokens' at their positions, and the tree is
the best N paths. No value is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.candidates import NEVER, select_nodes
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
    """

    def __init__(self, positions: int, width: int, budget: int, device: torch.device | str) -> None:
        self.width, self.budget, self.max_depth = min(width, budget), budget, positions
        pairs = [
            (parent, choice)
            for parent in range(budget)
            for choice in range(min(self.width, budget // (parent + 1)))
        ]
        self.parent, self.choice = torch.tensor(pairs, device=device).T
        depth = torch.arange(1, positions + 1, device=device)
        self.depth = depth.repeat_interleave(budget)[None]  # [1, K·N]

    def grow(self, logprob: Tensor, token: Tensor) -> DraftTree:
        """R trees of N slots.

        Args:
            logprob: [R, K, ≥ B] float32, of each position's choices, descending, in nats; −inf:
                no choice.
            token: [R, K, ≥ B] int64, their target ids, different ones within a position.
        """
        logprob, unused = logprob[..., : self.width].clamp(max=0), (0, self.budget - self.width)
        # N nodes per level, the best first; node n of level k is candidate (k − 1)·N + n + 1.
        scores = [pad(logprob[:, 0], unused, value=NEVER)]
        tokens = [pad(token[:, 0, : self.width], unused)]
        parents = [torch.zeros_like(tokens[0])]
        for level in range(1, self.max_depth):
            score = scores[-1][:, self.parent] + logprob[:, level, self.choice]
            best = score.topk(self.budget)
            scores.append(best.values)
            tokens.append(token[:, level].gather(1, self.choice[best.indices]))
            parents.append(self.parent[best.indices] + 1 + (level - 1) * self.budget)
        token, parent, score = (torch.cat(each, 1) for each in (tokens, parents, scores))
        return select_nodes(
            token, parent, score, self.depth, None, self.budget, self.max_depth
        ).tree
