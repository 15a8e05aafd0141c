"""Drafting switch: pauses drafting where plain decoding is faster."""

from __future__ import annotations

import numpy as np

_PATIENCE, _PATIENCE_MEASURED = 8, 3
"""Consecutive steps in which plain decoding is faster before drafting is paused; the second value
where both were timed."""

_MARGIN = 0.03
"""Relative gain that ends a pause; the margin avoids flapping."""

_PROBE_STEPS = 6
_PROBE_AFTER, _PROBE_LATEST = 128, 1024
"""Paused steps before a probe, which drafts for some steps in case the texts have changed. The wait
doubles with each probe."""

_PROBE_SHARE = 0.02
"""Share of the paused time that a probe may cost, catching up included."""

_WORST = 1 / 3
"""Lowest gain assumed for the cost of a probe; one slow measurement must not end all probes."""

_REPAID_IN = 64
"""Steps in which drafting must win back the time to catch up. The limit is short, since requests
may end soon."""

_PROBE_DECAY = 0.7
"""Decay of `usual` in each step of a probe."""


class DraftingSwitch:
    """Decides whether to draft, by the acceptance that an average tree is expected to have.

    Paused drafters do not read committed rows either, so a paused step costs as much as plain
    decoding. Running requests must catch up afterwards, or get no more drafts. A few slow steps do
    not pause drafting.

    Attributes:
        all_paused: drafting is paused.
        usual: [N] float, mean survival of a tree's nodes, best first. Starts with one step in which
            every node was accepted; later, older steps count less.

    Args:
        num_nodes: N.
        probes: draft for some steps of a long pause, in engines that can catch up. Otherwise only
            new requests end a pause.
        decay: weight of a step one step later.
    """

    def __init__(self, num_nodes: int, probes: bool = False, decay: float = 0.98) -> None:
        self.all_paused = False
        self.usual = np.ones(num_nodes)
        self.probes, self.decay = probes, decay
        self._slower, self._learned = 0, 0
        self._rested, self._wait = 0, _PROBE_AFTER
        self._probing = 0  # steps left of the probe

    def learn(self, survival: np.ndarray) -> None:
        """Learn from the trees to be verified: survival [R, N], descending in each row."""
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
        """Decide whether drafting is paused from now on.

        Args:
            num_requests: requests that decode after this step.
            draft_cost: time to draft for them.
            verify_cost: [T] times of a target forward over 0 … T − 1 tokens, in the same unit;
                larger budgets are not verified.
            gain: measured speed with drafts over speed without; None: derive it from the costs.
            catch_up: time that the drafters need to read missed rows, in the same unit.
            can_wait: drafters have rows to read; with a known `gain`, pausing then needs no
                consecutive slow steps.
            drafting: number of requests with drafts; None: all.
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
