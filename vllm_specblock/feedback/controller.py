"""Controller: whether to draft, which drafter to ask, and how many nodes to verify.

One law decides: take what yields the most tokens per time. λ is the best yield that is known, in
tokens per relative cost (`step_cost.py`). Verifying n nodes pays while the expected tokens less
λ times their cost rise. Drafting pays while its yield is above that of plain steps. The way that
is not taken is tried now and then, to know its yield.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_specblock.feedback.step_cost import NOISE, StepCost

TREES = 256
"""Trees that the expected yield is averaged over."""

LOSS = 2.0
"""Plain steps' worth of yield that drafting may lose before it pauses."""

LONGEST, TRIAL = 224, 4
"""Steps after which the other way is tried, where that pays for itself; steps of a trial of
drafting, at least."""

SHARE = 0.006
"""Share of a pause's time that trying to draft may cost."""

HORIZON = 64
"""Steps in which drafting has to win back the time to read prompts and missed rows."""

_GAIN = 1.5  # of drafting, while nothing is known


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
        self.expected = self.accepted = 3.0

    def add(self, survival: np.ndarray) -> None:
        for row in survival:
            self.survival[self.count % TREES] = row
            self.count += 1

    def keep(self, count: int) -> None:
        """Forget all but the last trees, and half of the verdicts: drafters learn meanwhile."""
        count = min(count, self.count, TREES)
        self.survival[:count] = self.survival[np.arange(self.count - count, self.count) % TREES]
        self.count = count
        self.expected, self.accepted = 0.5 * self.expected + 1.5, 0.5 * self.accepted + 1.5

    def verified(self, expected: float, accepted: int) -> None:
        """Learn from the nodes of a step."""
        keep = 1 - 1 / TREES
        self.expected = 3 + keep * (self.expected - 3) + expected
        self.accepted = 3 + keep * (self.accepted - 3) + accepted

    @property
    def correction(self) -> float:
        """Accepted tokens over expected ones."""
        return min(max(self.accepted / self.expected, 0.2), 1.5)

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
    | drafting | two steps without | every LONGEST steps, or 2 TRIAL while the gain is uncertain |
    | drafting | paused | the yield was below that of plain steps, by LOSS steps in sum |
    | paused | drafting | another batch size or kind of sampling has a gain |
    | paused | trying | of this kind of sampling nothing is known |
    | paused | trying | the pause has paid for TRIAL steps, or after LONGEST; later if the last \
trial cost more than its share |
    | trying | drafting | it ends with a gain |
    | trying | paused | it ends without |

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
        self._gain, self._steps = _GAIN, 0
        self._rows, self._expected = 1, 0.0  # rows of the step; tokens, of its nodes
        self._asked, self._prompts = 1.0, 0.0  # share of the proposals; cost of prompts, per step
        self._lost, self._paid = 0.0, 0.0  # of drafting, in plain steps; for trials of it
        self._since, self._trial = 0, 0  # steps since a trial; of one, to come

    def observe(self, step: Step, sampling: bool = False) -> None:
        """Learn from a step that decoded the same requests as the next one."""
        drafting = step.draft_seconds if step.drafted else 0.0
        if step.trees or not step.drafted:  # else it took longer than a plain one
            self.cost.observe(step.rows, step.requests, step.trees, step.seconds - drafting)
        if step.drafted:
            self.cost.observe_draft(step.requests, step.asked, step.draft_seconds, step.read)
            self._asked += 0.1 * (step.asked - self._asked)
        self._prompts *= 1 - 1 / HORIZON
        if step.trees and step.tokens is not None:
            self._yields[sampling].verified(self._expected, step.tokens - step.requests)
            self._expected = 0.0

    def observe_prompts(self, seconds: float) -> None:
        """Learn what drafters took to read prompts; steps with drafts have to win it back."""
        self._prompts += self.cost.of(max(seconds, 0.0)) / HORIZON

    def gain(self, requests: int, sampling: bool = False) -> float:
        """Return the expected yield of drafting over that of plain steps; sets λ."""
        known, share = self._yields[sampling], self._asked
        tokens = known.tokens()
        nodes = np.arange(len(tokens)) / max(min(known.count, TREES), 1)
        draft = share * self.cost.draft(requests) + (1 - share) * self.cost.draft(requests, False)
        cost = self.cost.verify(requests * (1 + nodes), requests) + draft + self._prompts
        drafting = float((requests * (1 + tokens) / cost).max())
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
        now_and_then, kind = self._steps % (2 * TRIAL) == 0, _kind(requests, sampling)
        if now_and_then or known.count < 16 or kind != self._kind or self._rate is None:
            self._gain, self._kind = self.gain(requests, sampling), kind
        best = np.sort(survival[survival > 0])[::-1][:most]
        tokens = np.concatenate(([0.0], np.cumsum(best)))
        sizes = padded(rows + np.arange(len(tokens)))
        value = known.correction * tokens - self._rate * self.cost.verify(sizes, requests)
        nodes = int(value.argmax())
        if now_and_then and self.cost.doubt(rows + 2 * nodes + 2, requests) > NOISE:
            nodes = 2 * nodes + 2  # to learn what they cost
        nodes = min(int(padded(np.array([rows + nodes]))[0]) - rows, len(best))
        self._expected, self._rows = float(tokens[nodes]), rows + nodes
        return nodes

    def asks(self, gained: float, requests: int, behind: int) -> bool:
        """Whether a drafter with weights is worth asking beside one without.

        Args:
            gained: tokens that its nodes are expected to bring in the next step.
            behind: rows that it has missed.
        """
        extra = self.cost.draft(requests) - self.cost.draft(requests, False)
        rate = self._rate or _GAIN * requests / self.cost.plain(requests)
        price = rate * (extra + self.cost.read * behind / HORIZON)
        return bool(gained > price)  # host numbers

    def drafts(self, requests: int, sampling: bool = False, behind: int = 0) -> bool:
        """Decide whether this step drafts; the next one is plain if not.

        Args:
            behind: rows that the drafters have missed.
        """
        before, self._kind = self._kind, _kind(requests, sampling)
        self._since += 1
        if self._trial:
            self._paid -= self._extra(requests)  # by what is known of it now
        if self._trial > 1:
            self._trial -= 1
        elif self._trial or (self.paused and self._kind != before):
            if self.paused:
                self.paused = self.gain(requests, sampling) < 1
            if self._trial or not self.paused:
                self._since = self._trial = 0
        elif self.paused:
            self._try(requests, sampling, behind)
        else:
            self._lost = max(0.0, self._lost + 1 - self._gain)
            doubt = self.cost.doubt(self._rows, requests)
            wait = LONGEST if math.log(self._gain) > 2 * doubt else 2 * TRIAL
            if self._lost > LOSS:
                self.paused, self._lost, self._paid, self._since = True, 0.0, 0.0, 0
            elif doubt and self._since >= wait:
                self._trial = 2  # one that drafts at its end is not plain: the second is timed
        return self.paused == (self._trial > 0)

    def _try(self, requests: int, sampling: bool, behind: int) -> None:
        """Begin a trial of drafting, if the pause has paid for it."""
        extra, known = self._extra(requests), self._yields[sampling]
        self._paid += SHARE * self.cost.plain(requests)
        price = 0.0 if self._since >= LONGEST else TRIAL * extra
        if known.count and (self._paid < price or self._since < 8 * TRIAL):
            return
        reading = self.cost.read * behind
        self._trial = max(int((self._paid - reading) / extra), TRIAL)
        self._paid -= reading
        known.keep(self._trial * requests)  # of an earlier trial

    def _extra(self, requests: int) -> float:
        """What a step that drafts costs more than a plain one."""
        plain = self.cost.plain(requests)
        trees = float(self.cost.verify(requests, requests)) - plain
        return max(self.cost.draft(requests) + trees, 0.01 * plain)


def _kind(requests: int, sampling: bool) -> tuple[int, int]:
    """1, 2, 3–4, 5–8, … requests are one class each, of either kind of sampling."""
    return (requests - 1).bit_length(), int(sampling)
