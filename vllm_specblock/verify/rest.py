"""Whether drafting pays at all with so many requests at once, or plain decoding is quicker."""

from __future__ import annotations

import numpy as np

_PATIENCE = 8
"""Steps in a row in which plain decoding would have been quicker, before drafting stops."""

_MARGIN = 0.03
"""Drafting starts again only where it would be quicker by so much: to and fro costs more."""


class Rest:
    """Decides between drafting and resting, by what a usual tree is expected to have accepted.

    While heads rest they do not even follow the target: that is what makes a step of a resting
    engine a step of plain decoding. It also means that requests which were there at the time can
    not be drafted for later. So nobody rests because of a few steps.

    Attributes:
        resting: now.
        usual: [N] float, the survival of a tree's nodes, best first, of a request on average;
            older steps count less.

    Args:
        num_nodes: N.
        decay: what a step counts one step later.
    """

    def __init__(self, num_nodes: int, decay: float = 0.98):
        self.resting = False
        self.usual = np.ones(num_nodes)
        self.decay = decay
        self._slower = 0

    def learn(self, survival: np.ndarray) -> None:
        """Take note of trees that stand to be verified: survival [R, N], descending by row."""
        if len(survival):
            self.usual = self.decay * self.usual + (1 - self.decay) * survival.mean(axis=0)

    def decide(self, num_requests: int, draft_cost: float, verify_cost: np.ndarray) -> bool:
        """Whether the heads rest from now on.

        Args:
            num_requests: requests that decode.
            draft_cost: time of one step's drafting for them.
            verify_cost: [T] times of a target forward over 0 … T − 1 tokens, in the same unit;
                drafts that it has no room for are not verified.
        """
        nodes = np.arange(len(self.usual) + 1)
        tokens = num_requests * (1 + nodes)
        fits = tokens < len(verify_cost)
        if not fits[0]:
            return self.resting
        gained = num_requests * (1 + np.concatenate(([0.0], np.cumsum(self.usual))))
        speed = (gained[fits] / (draft_cost + verify_cost[tokens[fits]])).max()
        plain = num_requests / verify_cost[num_requests]
        if self.resting:
            self.resting = speed < (1 + _MARGIN) * plain
        else:
            self._slower = self._slower + 1 if speed < plain else 0
            self.resting = self._slower >= _PATIENCE
        if self.resting:
            self._slower = 0
        return self.resting
