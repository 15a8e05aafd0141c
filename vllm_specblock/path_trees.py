"""Trees of the best paths through a block of positions that are drafted at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_specblock.candidates import NEVER, select_nodes
from vllm_specblock.tree import DraftTree


class PathTrees:
    """Finds the best N of R requests' paths through K positions of B = `width` choices, exactly.

    Ties go to the lower depth. No value is read on the host.

    Args:
        in_pairs: what a choice scores depends on the choice before it. Otherwise, with parents and
            choices from best to worst, child j of parent i is no better than the i·j − 1 others of
            numbers up to i and j: only those with i·j ≤ N can be among the best N.
    """

    def __init__(
        self,
        positions: int,
        width: int,
        budget: int,
        device: torch.device | str,
        in_pairs: bool = False,
    ) -> None:
        self.width, self.budget, self.max_depth = width, budget, positions
        pairs = [
            (parent, choice)
            for parent in range(budget)
            for choice in range(width if in_pairs else min(width, budget // (parent + 1)))
        ]
        self.parent, self.choice = torch.tensor(pairs, device=device).T
        depth = torch.arange(1, positions + 1, device=device)
        self.depth = depth.repeat_interleave(budget)[None]  # [1, K·N]

    def grow(self, logprob: Tensor, token: Tensor) -> DraftTree:
        """Return R trees of N slots.

        Args:
            logprob: [R, K, ≥ B] float32, descending, in nats; −inf: no choice. In pairs
                [R, K, B, B], in any order, the first B being the choice at the position before;
                those of the first position are the same.
            token: [R, K, ≥ B] int64, target ids, different ones within a position.
        """
        N = self.budget
        # N nodes per level, the best first; node n of level k is candidate (k − 1)·N + n + 1.
        score = pad(logprob.new_zeros(len(token), 1), (0, N - 1), value=NEVER)
        choice = torch.zeros_like(score, dtype=torch.int64)
        scores, tokens, parents = [], [], []
        for level, gain in enumerate(logprob.clamp(max=0).unbind(1)):
            if gain.dim() == 2:
                gains = gain[:, self.choice]
            else:
                pair = choice[:, self.parent] * self.width + self.choice
                gains = gain.flatten(1).gather(1, pair)
            score, best = (score[:, self.parent] + gains).topk(N)
            choice, parent = self.choice[best], self.parent[best] + 1 + (level - 1) * N
            scores.append(score)
            tokens.append(token[:, level].gather(1, choice))
            parents.append(parent if level else torch.zeros_like(parent))
        token, parent, score = (torch.cat(each, 1) for each in (tokens, parents, scores))
        return select_nodes(token, parent, score, self.depth, N, self.max_depth)
