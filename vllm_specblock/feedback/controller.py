"""Controller: whether to draft, which drafter to ask, and how many nodes to verify.

One law decides: take what yields the most tokens per time. λ is the best yield that is known, in
tokens per relative cost (`step_cost.py`). Verifying n nodes pays while the expected tokens less
λ times their cost rise. Drafting pays while its yield is above that of plain steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_specblock.feedback.step_cost import StepCost

TREES = 256
"""Trees that the expected yield is averaged over."""

LOSS = 2.0
"""Plain steps' worth of yield that drafting may lose before it pauses."""

PLAIN_EVERY = 256
"""Steps with drafts after which a plain one is taken, to time it; fewer at first, and where
the gain is small."""

PROBE_AFTER, PROBE_SHARE, PROBE_STEPS = 224, 0.007, 4
"""Paused steps before a probe; share of the paused time that it may cost; its least steps."""

_EXPLORE_EVERY = 48  # steps; then a budget is halved or doubled, to learn what rows cost
_DECAY = 0.995  # of expected and accepted tokens
_CLOSE = 1.1  # gain
_RATE = 1.5  # gain of drafting while nothing is known, as with trees of a fixed size
_HORIZON = 64  # steps in which a drafter has to win back the time to read missed rows


class Step(NamedTuple):
    """What a step of decoding requests was.

    Attributes:
        rows: of the target; trees: it verified trees; drafted: it made new ones.
        tokens: committed, of all requests; None: not known.
        seconds: of the step; draft_seconds: of drafting in it.
        asked: a drafter with weights drafted; read: rows that it had missed before.
    """

    requests: int
    rows: int
    trees: bool
    drafted: bool
    tokens: int | None
    seconds: float = 0.0
    draft_seconds: float = 0.0
    asked: bool = True
    read: int = 0


class _Yield:
    """Survival of the last trees, and by how much it was wrong."""

    def __init__(self, num_nodes: int) -> None:
        self.survival = np.zeros((TREES, num_nodes))
        self.count = 0
        self.expected = self.accepted = 0.0

    def add(self, survival: np.ndarray) -> None:
        for row in survival:
            self.survival[self.count % TREES] = row
            self.count += 1

    def forget(self) -> None:
        """Let what is seen next decide."""
        correction, self.count = self.correction, 0
        self.expected = min(self.expected, 3.0)
        self.accepted = correction * (self.expected + 3) - 3

    @property
    def correction(self) -> float:
        """Accepted tokens over expected ones."""
        return float(np.clip((self.accepted + 3) / (self.expected + 3), 0.2, 1.5))

    def tokens(self) -> np.ndarray:
        """[n + 1] accepted tokens of a request, by nodes of all trees together, best first."""
        known = self.survival[: min(self.count, TREES)]
        best = np.sort(known, axis=None)[::-1]
        found = np.concatenate(([0.0], np.cumsum(best)))
        return self.correction * found / max(len(known), 1)


class Controller:
    """Decides in every step, from what earlier steps took and yielded.

    | state | next | when |
    | --- | --- | --- |
    | drafting | two steps without | every PLAIN_EVERY steps |
    | drafting | paused | the yield was below that of plain steps, by LOSS steps in sum |
    | paused | drafting | another batch size or kind of sampling has a gain |
    | paused | probing | of this kind of sampling nothing is known |
    | paused | probing | after PROBE_AFTER steps; later where a probe costs more than its share |
    | probing | drafting | it ends with a gain |
    | probing | paused | it ends without |

    On a GPU, survival is that of an earlier step, and times come when the GPU has got there. Ranks
    of a tensor-parallel engine keep the costs measured at start: they have to decide alike.

    Args:
        num_nodes: N, most nodes of a tree.
    """

    def __init__(self, num_nodes: int) -> None:
        self.cost = StepCost()
        self.paused = False
        self._yields = _Yield(num_nodes), _Yield(num_nodes)  # greedy, sampled
        self._kind = 0, 0  # class of the batch size, sampling
        self._rate: float | None = None  # λ
        self._gain, self._steps = 1.5, 0
        self._expected = 0.0  # tokens, of the budget
        self._asked = 1.0  # share of the proposals
        self._lost, self._plain_after = 0.0, 8
        self._since_plain = self._rested = self._probing = 0
        self._wait = PROBE_AFTER
        self._prompts, self._drafted = 0.0, float(TREES)  # cost of prompts; over so many steps

    def observe(self, step: Step, sampling: bool = False) -> None:
        """Learn from a step that decoded the same requests as the next one."""
        drafting = step.draft_seconds if step.drafted else 0.0
        if step.trees or not step.drafted:  # else it took longer than a plain one
            self.cost.observe(step.rows, step.requests, step.trees, step.seconds - drafting)
        if step.drafted:
            self.cost.observe_draft(step.requests, step.asked, step.draft_seconds, step.read)
            self._asked += 0.1 * (step.asked - self._asked)
            keep = 1 - 1 / TREES
            self._prompts, self._drafted = keep * self._prompts, keep * self._drafted + 1
        if step.trees and step.tokens is not None:
            known = self._yields[sampling]
            known.expected = _DECAY * known.expected + self._expected
            known.accepted = _DECAY * known.accepted + step.tokens - step.requests
            self._expected = 0.0

    def observe_prompts(self, seconds: float) -> None:
        """Learn what drafters took to read prompts; steps with drafts have to win it back."""
        self._prompts += self.cost.of(max(seconds, 0.0))

    def gain(self, requests: int, sampling: bool = False) -> float:
        """Return the expected yield of drafting over that of plain steps; sets λ."""
        known = self._yields[sampling]
        tokens = known.tokens()
        nodes = np.arange(len(tokens)) / max(min(known.count, TREES), 1)
        share = self._asked
        draft = share * self.cost.draft(requests) + (1 - share) * self.cost.draft(requests, False)
        cost = self.cost.verify(requests * (1 + nodes), requests) + draft
        drafting = float((requests * (1 + tokens) / (cost + self._prompts / self._drafted)).max())
        plain = requests / self.cost.plain(requests)
        self._rate = max(drafting, plain)
        return drafting / plain

    def budget(
        self,
        survival: np.ndarray,
        requests: int,
        rows: int,
        most: int | None = None,
        sampling: bool = False,
        padded: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    ) -> int:
        """Return how many nodes to verify in a step.

        Args:
            survival: [R, N], descending in each row; 0 where there is no node.
            rows: of the step without nodes.
            most: nodes, at most; None: all.
            padded: [n] rows → [n] rows that such steps are run with.
        """
        known = self._yields[sampling]
        known.add(survival[survival[:, 0] < 1])  # 1: nothing is known yet
        self._steps += 1
        kind = _kind(requests, sampling)
        if self._steps % 8 == 0 or known.count < 16 or kind != self._kind or self._rate is None:
            self._gain, self._kind = self.gain(requests, sampling), kind
        best = np.sort(survival[survival > 0])[::-1][:most]
        tokens = np.concatenate(([0.0], np.cumsum(best)))
        sizes = padded(rows + np.arange(len(tokens)))
        value = known.correction * tokens - self._rate * self.cost.verify(sizes, requests)
        nodes = int(value.argmax())
        turn, rest = divmod(self._steps, _EXPLORE_EVERY)
        if rest == 0:
            nodes = 2 * nodes + 2 if turn % 2 else nodes // 2
        elif rest % 8 == 0 and not self.cost.knows(rows + 2 * nodes + 2):
            nodes = 2 * nodes + 2
        nodes = min(int(padded(np.array([rows + nodes]))[0]) - rows, len(best))
        self._expected = float(tokens[nodes])
        return nodes

    def asks(self, gained: float, requests: int, behind: int) -> bool:
        """Whether a drafter with weights is worth asking beside one without.

        Args:
            gained: tokens that its nodes are expected to bring in the next step.
            behind: rows that it has missed.
        """
        extra = self.cost.draft(requests) - self.cost.draft(requests, False)
        rate = self._rate or _RATE * requests / self.cost.plain(requests)
        price = rate * (extra + self.cost.read * behind / _HORIZON)
        return bool(gained > price)  # host numbers

    def drafts(self, requests: int, sampling: bool = False, behind: int = 0) -> bool:
        """Decide whether this step drafts; the next one is plain if not.

        Args:
            behind: rows that the drafters have missed.
        """
        kind = _kind(requests, sampling)
        if self._probing:
            self._probing -= 1
            if self._probing:
                return True
            self.paused = self.gain(requests, sampling) < 1
            self._rested = self._since_plain = 0
            self._kind = kind
        elif self.paused:
            self._rested += 1
            if kind != self._kind:
                self._kind = kind
                self.paused = self.gain(requests, sampling) < 1
            unknown = not self._yields[sampling].count
            if self.paused and (self._rested >= self._wait or unknown):
                self._probe(requests, sampling, behind)
                return True
        else:
            if self._since_plain < 0:
                self._since_plain = 0
                return False
            self._since_plain += 1
            self._lost = max(0.0, self._lost + 1 - self._gain)
            self.paused = self._lost > LOSS
            self._rested, self._wait = 0, PROBE_AFTER
            if self.paused:
                self._lost = 0.0
            elif self._since_plain >= self._plain_after:
                often = 8 if self.cost.compared else 32
                most = PLAIN_EVERY if self._gain > _CLOSE else PLAIN_EVERY // often
                # A step that drafts at its end is none either: the second one is timed.
                self._since_plain, self._plain_after = -1, min(2 * self._plain_after, most)
                return False
        return not self.paused

    def _probe(self, requests: int, sampling: bool, behind: int) -> None:
        """Begin a probe, as long as the pause has paid for."""
        plain = self.cost.plain(requests)
        extra = self.cost.draft(requests) + float(self.cost.verify(requests, requests)) - plain
        reading = self.cost.read * behind
        account = PROBE_SHARE * self._rested * plain
        steps = (account - reading) / max(extra, 0.01 * plain)
        self._probing = int(np.clip(steps, PROBE_STEPS, 8 * PROBE_STEPS))
        lost = self._probing * max(extra, 0.0) + reading
        self._wait = max(PROBE_AFTER, int(lost / (PROBE_SHARE * plain)))
        self._yields[sampling].forget()


def _kind(requests: int, sampling: bool) -> tuple[int, int]:
    """1, 2, 3–4, 5–8, … requests are one class each, of either kind of sampling."""
    return (requests - 1).bit_length(), int(sampling)
