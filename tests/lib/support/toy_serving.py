"""A served stream of numbers alone: what a policy's choices make of tokens per second.

A drafter knows each domain to a share between 0 and 1. An update closes a part of the gap to
knowing the domain that is served, sometimes none of it, and blurs the others. Where a policy is
gated, what looks worse is not served, nor trained on from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specblock.adapt.policy.evidence import FallDetector
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest, Policy

STEP, TOKENS = 0.025, 96
"""Seconds of a target step, and tokens of an answer."""

LEARNED = {Action.HEADS: 0.04, Action.FULL: 0.08}
"""Share of the gap that an update closes, on average."""

NOISE = 0.012
"""Standard error of a judged gain."""


@dataclass(frozen=True)
class Toy:
    """What is served, and what updates cost.

    Attributes:
        domains: of the requests, in order.
        seconds: that an update of each arm takes from serving.
        misled: full updates, the first ones, whose judged gain comes out 0.06 too low.
    """

    domains: Sequence[int]
    seconds: dict[Action, float]
    misled: int = 0

    def serve(self, policy: Policy, seed: int) -> tuple[float, list[Action]]:
        """(Tokens per second, updates). Texts and luck are the same for every policy."""
        known, falls, updates = {0: 1.0, 1: 0.1}, FallDetector(), list[Action]()
        judged: tuple[Action, float, int] | None = None  # arm, gain, requests until it is reported
        committed = elapsed = stall = 0.0
        misled = self.misled
        for number, domain in enumerate(self.domains):
            draw = random.Random(f"{seed} {number}")
            tau = _tau(known[domain]) * draw.lognormvariate(0, 0.15)
            steps = max(1, round(TOKENS / tau))
            misses = steps * (0.85 - 0.5 * known[domain])
            request = FinishedRequest(misses, steps, TOKENS, stall + STEP * steps)
            committed, elapsed, stall = committed + TOKENS, elapsed + request.seconds, 0.0
            if judged is not None:
                action, gain, left = judged
                judged = (action, gain, left - 1) if left > 1 else None
                if left == 1:
                    wrong = action is Action.FULL and misled > 0
                    misled -= wrong
                    gain += draw.gauss(-0.06 * wrong, NOISE)
                    policy.reward(action, gain, self.seconds[action], NOISE)
            if falls.add(request.tau):
                falls.reset()
                policy.alarm()
            decision = policy.decide(request)
            if decision.update:
                updates.append(decision.push)
                stall = self.seconds[decision.push]
                part = LEARNED[decision.push] * max(0.0, draw.gauss(1, 1))
                learned = {each: share * (1 - part / 10) for each, share in known.items()}
                learned[domain] += part * (1 - learned[domain])
                gain = _tau(learned[domain]) / _tau(known[domain]) - 1
                judged = decision.push, gain, 8
                if not policy.gated or gain + draw.gauss(0, NOISE) > 0:
                    known = learned
        return committed / elapsed, updates


def _tau(known: float) -> float:
    return 1.6 + 2.6 * known
