"""Drafting switch: pauses drafting where plain decoding is quicker."""

from __future__ import annotations

import numpy as np

_PATIENCE, _PATIENCE_MEASURED = 8, 3
"""Steps in a row in which plain decoding would have been quicker, before drafting stops; the second
where both were timed."""

_MARGIN = 0.03
"""Drafting starts again only where it would be quicker by so much: to and fro costs more."""

_PROBE_STEPS = 6
_PROBE_AFTER, _PROBE_LATEST = 128, 1024
"""After so many steps at rest some are drafted for, to see whether the texts have changed; after
twice as many the next time, and so on."""

_PROBE_SHARE = 0.02
"""Of the time at rest, what a probe may lose: by catching up, and by its steps."""

_WORST = 1 / 3
"""Gain below which a probe is thought to lose no more: a single slow measurement must not be one
for good."""

_REPAID_IN = 64
"""Steps in which drafting again has to win what catching up takes: nobody knows how long requests
go on, and the last ones of a batch are no reason to read for all of them what was missed."""

_PROBE_DECAY = 0.7
"""Of what is known of trees, with every probed step."""


class DraftingSwitch:
    """Decides between drafting and resting, by what a usual tree is expected to have accepted.

    While drafters rest they do not even follow the target: that is what makes a step of a resting
    engine a step of plain decoding. Requests which were there at the time have to be caught up
    with, or can not be drafted for later. So nobody rests because of a few steps.

    Attributes:
        all_paused: now.
        usual: [N] float, the survival of a tree's nodes, best first, of a request on average: of
            all steps at first, beside one in which every node was accepted; later older steps
            count less.

    Args:
        num_nodes: N.
        probes: draft for some steps of a long rest, for engines whose requests can be drafted for
            after it. Without, new requests are what a rest ends with.
        decay: what a step counts one step later.
    """

    def __init__(self, num_nodes: int, probes: bool = False, decay: float = 0.98) -> None:
        self.all_paused = False
        self.usual = np.ones(num_nodes)
        self.probes, self.decay = probes, decay
        self._slower, self._learned = 0, 0
        self._rested, self._wait = 0, _PROBE_AFTER
        self._probing = 0  # steps that are still to be drafted for, whatever is known

    def learn(self, survival: np.ndarray) -> None:
        """Take note of trees that stand to be verified: survival [R, N], descending by row."""
        if len(survival):
            self._learned += 1
            mean = self._learned / (1 + self._learned)
            decay = min(mean, _PROBE_DECAY if self._probing else self.decay)
            self.usual = decay * self.usual + (1 - decay) * survival.mean(axis=0)

    def decide(
        self,
        num_requests: int,
        draft_cost: float,
        verify_cost: np.ndarray,
        gain: float | None = None,
        catch_up: float = 0.0,
        can_wait: bool = False,
        drafting: int | None = None,
    ) -> bool:
        """Whether drafting is paused from now on.

        Args:
            num_requests: requests that decode after this step.
            draft_cost: time of one step's drafting for them.
            verify_cost: [T] times of a target forward over 0 … T − 1 tokens, in the same unit;
                drafts that it has no room for are not verified.
            gain: measured speed with drafts over that without, in place of what follows from costs;
                None: not known.
            catch_up: time that the drafters would take to read what they have missed, in the same
                unit.
            can_wait: drafters have not read the last step, or there are prompts for them to read:
                where `gain` is known, nobody has to see it several times in a row.
            drafting: those of the requests that are drafted for; None: all.
        """
        paused = self.all_paused or (can_wait and gain is not None)
        nodes = np.arange(len(self.usual) + 1)
        drafting = num_requests if drafting is None else drafting
        tokens = num_requests + drafting * nodes
        fits = tokens < len(verify_cost)
        if not fits[0]:
            return self.all_paused
        gained = num_requests + drafting * np.concatenate(([0.0], np.cumsum(self.usual)))
        patience = _PATIENCE if gain is None else _PATIENCE_MEASURED
        if gain is None:
            speed = (gained[fits] / (draft_cost + verify_cost[tokens[fits]])).max()
            gain = speed * verify_cost[num_requests] / num_requests
        if paused:
            if not self.all_paused:
                self._wait = _PROBE_AFTER
            self._rested += 1
            step = verify_cost[num_requests]
            plain_steps = _PROBE_STEPS * (1 + self.usual.sum())  # for the tokens of a probe
            lost = catch_up + plain_steps * max(0.0, 1 / max(gain, _WORST) - 1) * step
            cheap = lost <= _PROBE_SHARE * self._rested * step
            repaid = catch_up <= _REPAID_IN * (gain - 1) * step
            if self.probes and self._rested >= self._wait and cheap:
                self._probing, self._wait = _PROBE_STEPS, min(2 * self._wait, _PROBE_LATEST)
                self.all_paused = False
            else:
                self.all_paused = gain < 1 + _MARGIN or not repaid
        elif self._probing:
            self._probing -= 1
            self.all_paused = not self._probing and gain < 1 + _MARGIN
        else:
            self._slower = self._slower + 1 if gain < 1 else 0
            self.all_paused = self._slower >= patience
            if self.all_paused:
                self._wait = _PROBE_AFTER
        if self.all_paused:
            self._slower = 0
        else:
            self._rested = 0
        return self.all_paused
