"""Skip gate: the tokens that a drafter is expected to add to n-gram lookup.

Every step shows how often the lookup is right, with or without the drafter.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_specblock.tree import DraftTree

BUCKETS = 9
"""Bins of the lookup's confidence in the next token: none (no tree), then eighths."""

_DECAY = 0.998  # weight of a step one step later: half in 350 steps
_IMAGINED = 4.0  # prior steps: the lookup is as right as it is sure, the drafter gains 1 if not


def first_token(tree: DraftTree) -> torch.Tensor:
    """Return the confidence of R trees to contain the next token, [R] fp32, 0 … 1."""
    return torch.where(tree.depth == 1, tree.logprob.exp(), 0.0).sum(1).clamp(max=1.0)


class DrafterGate:
    """Estimates Σ (1 − p) G; p: the lookup has the next token, G: the drafter's gain if not.

    In numpy, for host memory only.
    """

    def __init__(self) -> None:
        middle = np.maximum(np.arange(BUCKETS) - 0.5, 0.0) / (BUCKETS - 1)
        self.seen, self.right = np.full(BUCKETS, _IMAGINED), _IMAGINED * middle
        self.missed = self.gained = _IMAGINED

    def expects(self, sure: np.ndarray) -> float:
        """Return the tokens that the drafter is expected to add; sure: [R], see `first_token`."""
        wrong = (1 - self.right / self.seen)[_bucket(sure)]
        return float(wrong.sum() * self.gained / self.missed)  # a host number

    def learn(
        self, sure: np.ndarray, asked: np.ndarray, right: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Learn from R verified trees, of which `accepted` [R] tokens were accepted.

        sure: as given to `expects`. asked: [R] bool, the drafter ran. right: [R] bool, the first
        accepted token was the lookup's.
        """
        if len(sure):
            place, wrong = _bucket(sure), asked & ~right
            self.seen = _DECAY * self.seen + np.bincount(place, minlength=BUCKETS)
            self.right = _DECAY * self.right + np.bincount(place, right, BUCKETS)
            self.missed = _DECAY * self.missed + wrong.sum()
            self.gained = _DECAY * self.gained + accepted[wrong].sum()


def _bucket(sure: np.ndarray) -> np.ndarray:
    return np.ceil(sure * (BUCKETS - 1)).astype(np.int64)
