"""Skip gate: whether a drafter is worth its time where a lookup already gives a tree.

Where an answer repeats what was written before, looking it up costs next to nothing and is right
for many tokens in a row; a drafter beside it takes its time and adds little. How often the lookup
is right is seen in every step, whoever drafted: nothing has to be tried out to learn it.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_specblock.tree import DraftTree

BUCKETS = 9
"""By how sure the lookup is of the next token: not at all (it has no tree), then in eighths."""

_IMAGINED = 4.0
"""Steps that count before any was seen: in them a lookup is right as often as it says and accepts
`_ACCEPTED` tokens then, and a drafter gains `_GAIN` where it is wrong."""
_ACCEPTED, _GAIN = 3.0, 1.0


def first_token(tree: DraftTree) -> torch.Tensor:
    """How sure trees are that the next token is among theirs. R trees → [R] fp32, 0 … 1."""
    return torch.where(tree.depth == 1, tree.logprob.exp(), 0.0).sum(1).clamp(max=1.0)


class DrafterGate:
    """Decides for a whole batch, since a drafter's time is that of reading its weights.

    With p the probability that the lookup has the next token, A the tokens that are then accepted
    of it, and G those that the drafter's nodes bring where it has not, drafting is worth
    Σ (1 − p) G tokens beside Σ (1 + p A), and takes `cost` more time: it pays where the first is
    more than `cost` times the second.

    On the host, in numpy: for devices whose memory is the host's.

    Args:
        cost: what drafting adds to a step, as a share of its time without.
        decay: what a step counts one step later. The default forgets half in 350 steps.
    """

    def __init__(self, cost: float, decay: float = 0.998) -> None:
        self.cost, self.decay = cost, decay
        says = np.concatenate(([0.0], (np.arange(BUCKETS - 1) + 0.5) / (BUCKETS - 1)))
        self.seen = np.full(BUCKETS, _IMAGINED)
        self.right = _IMAGINED * says
        self.accepted = _IMAGINED * says * _ACCEPTED
        self.missed, self.gained = _IMAGINED, _IMAGINED * _GAIN

    def asks(self, sure: np.ndarray) -> bool:
        """Whether the drafter is to draft; sure: [R] of each request, see `first_token`."""
        place = _bucket(sure)
        right = self.right / self.seen
        gain = ((1 - right[place]) * self.gained / self.missed).sum()
        tokens = (1 + (self.accepted / self.seen)[place]).sum()
        return bool(gain > self.cost * tokens)  # a host number

    def learn(
        self, sure: np.ndarray, asked: np.ndarray, right: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Take note of the trees of one step that were verified.

        Args:
            sure: [R], what `asks` was given.
            asked: [R] bool, the drafter drafted.
            right: [R] bool, the first accepted token was the lookup's.
            accepted: [R] integers, draft tokens accepted.
        """
        if not len(sure):
            return
        place = _bucket(sure)
        for total, of_step in (
            (self.seen, np.ones(len(sure))),
            (self.right, right),
            (self.accepted, right * accepted),
        ):
            total *= self.decay
            np.add.at(total, place, of_step)
        wrong = asked & ~right
        self.missed = self.decay * self.missed + wrong.sum()
        self.gained = self.decay * self.gained + accepted[wrong].sum()


def _bucket(sure: np.ndarray) -> np.ndarray:
    return np.ceil(sure * (BUCKETS - 1)).astype(np.int64)
