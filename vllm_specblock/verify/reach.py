"""How likely the target is to come by a node: its draft score, set right by what was seen so far.

A node's score is what the drafter says of it: exp(logprob) is its probability to be on the accepted
path if the drafter were the target. Drafters are wrong in a way that depends on how sure they are
and on whether the target samples. So verdicts are counted by score, and the score is corrected by
how often such nodes were reached. The sum over a tree's nodes is then the number of tokens that it
can be expected to have accepted: what a verify budget is to be weighed with.
"""

from __future__ import annotations

import torch

BINS_PER_NAT, NUM_BINS = 4, 32
"""Scores of a quarter nat are taken together, those below −8 nats, too."""

KINDS = 2
"""0: requests at temperature 0; 1: requests that sample."""

PRIOR = 4.0
"""Before anything was seen, so many nodes were expected in every bin and reached."""


class ReachTable:
    """Learns, on the device and without reading it, by what factor scores are off.

    All shapes are fixed, and the state is changed in place.

    Attributes (each [2, 32] fp32, by kind and bin, older steps counting less):
        expected: sum of exp(logprob) over the nodes that the target ran on.
        reached: how many of those were on the accepted path.

    Args:
        device: where all of it lies.
        decay: what a step counts one step later. The default forgets half in 140 steps.
    """

    def __init__(self, device: torch.device | str, decay: float = 0.995):
        self.decay = decay
        self.expected = torch.zeros(KINDS, NUM_BINS, device=device)
        self.reached = torch.zeros(KINDS, NUM_BINS, device=device)

    def learn(
        self, kind: torch.Tensor, logprob: torch.Tensor, reached: torch.Tensor, judged: torch.Tensor
    ) -> None:
        """Count what became of trees.

        Args:
            kind: [R] int64, see `KINDS`.
            logprob: [R, N] fp32, cumulative draft log-scores in nats, −inf where there is no node.
            reached: [R, N] bool, nodes on the accepted path.
            judged: [R, N] bool, nodes that the target ran on. Which those are may depend on
                scores, not on the target: nodes that were cut are not counted as missed.
        """
        score = torch.where(judged, logprob.exp(), 0.0)
        cell = (kind[:, None] * NUM_BINS + _bin(logprob)).flatten()
        keep = torch.where(judged.any(), self.decay, 1.0)
        counts = (self.expected, score), (self.reached, (reached & judged).float())
        for total, values in counts:
            total.mul_(keep).view(-1).index_add_(0, cell, values.flatten())

    def survival(self, kind: torch.Tensor, logprob: torch.Tensor) -> torch.Tensor:
        """The probability that each node is on the accepted path.

        It never rises from one node to the next, as scores do not: the first n nodes are always
        the n likeliest.

        Args:
            kind: [R] int64.
            logprob: [R, N] fp32, descending.

        Returns:
            [R, N] fp32; 0 where there is no node.
        """
        factor = (self.reached + PRIOR) / (self.expected + PRIOR)
        likely = logprob.exp() * factor[kind[:, None], _bin(logprob)]
        return likely.clamp(max=1.0).cummin(dim=1).values

    def steps(self, kind: torch.Tensor, logprob: torch.Tensor) -> torch.Tensor:
        """`survival` as a chain would have it: node i given that node i − 1 is there, [R, N] fp32.

        Their running product is `survival`. That is the form in which engines that verify chains
        take what they call confidences.
        """
        survival = self.survival(kind, logprob)
        before = torch.nn.functional.pad(survival[:, :-1], (1, 0), value=1.0)
        return torch.where(before > 0, survival / before, 0.0)


def on_path(path: torch.Tensor, accepted: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """The nodes of accepted paths.

    Args:
        path: [R, D+1] int64, node at each position; column 0 is the root.
        accepted: [R] integers, draft nodes on the path; what comes after them does not count.
        num_nodes: N.

    Returns:
        [R, N] bool, of nodes 1 … N.
    """
    counts = torch.arange(path.shape[1], device=path.device) <= accepted[:, None]
    found = torch.zeros(len(path), num_nodes + 1, dtype=torch.bool, device=path.device)
    return found.scatter_(1, torch.where(counts, path, 0), True)[:, 1:]


def _bin(logprob: torch.Tensor) -> torch.Tensor:
    """[...] fp32 → [...] int64, 0 for the surest."""
    return (-BINS_PER_NAT * logprob).clamp(0, NUM_BINS - 1).long()
