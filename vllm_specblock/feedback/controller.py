"""Controller: whether to draft, which drafter to run, and how many nodes to verify.

It maximises tokens per time. λ is the best known yield, in tokens per relative cost
(`step_cost.py`). Verifying n nodes pays while the expected tokens minus λ times their cost rise.
Drafting pays while its yield exceeds that of plain steps. The other choice is tried now and then
to measure its yield.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_specblock.feedback.step_cost import BRIEF, LOOKUP, NOISE, WHOLE, StepCost

TREES = 256
"""Trees of the average for the expected yield."""

LOSS = 2.0
"""Loss, in plain steps, after which drafting pauses."""

LONGEST, TRIAL = 224, 4
"""Steps after which the other choice is tried, if affordable; minimum steps of a trial."""

SHARE = 0.006
"""Share of a pause's time that trials may cost."""

HORIZON = 64
"""Steps in which drafting has to win back the time to read prompts and missed rows."""


PLAIN = -1
"""A budget: no node is worth verifying, and the step is to be plain, if it can be (`selective`)."""


class Step(NamedTuple):
    """Measurements of a step of decoding requests."""

    requests: int
    rows: int  # of the target
    trees: bool  # it verified trees
    drafted: bool  # it drafted new ones
    accepted: int | None = None  # nodes; None: unknown
    seconds: float = 0.0
    draft_seconds: float = 0.0  # of drafting in it
    by: int = WHOLE  # or LOOKUP or BRIEF
    read: int = 0  # missed rows that a drafter with weights read first


class _Yield:
    """Survival of the last trees, and its measured error."""

    def __init__(self) -> None:
        self.trees: deque[np.ndarray] = deque(maxlen=TREES)
        self.expected = self.accepted = 0.0  # tokens of verified nodes

    def keep(self, count: int) -> None:
        """Keep the last trees and half of the verdicts: drafters may adapt."""
        self.trees = deque(list(self.trees)[-count:], TREES)
        self.expected, self.accepted = 0.5 * self.expected, 0.5 * self.accepted

    def verified(self, expected: float, accepted: int) -> None:
        """Learn from the nodes of a step; the mean covers about TREES / 2 steps."""
        self.expected += expected - 2 / TREES * self.expected
        self.accepted += accepted - 2 / TREES * self.accepted

    @property
    def correction(self) -> float:
        """Return accepted over expected tokens, as if 3 had been accepted as expected."""
        return min(max((3 + self.accepted) / (3 + self.expected), 0.2), 1.5)

    def tokens(self) -> np.ndarray:
        """Return [n + 1] accepted tokens per request for the best 0 … n nodes of all trees."""
        best = np.sort(np.array(self.trees), axis=None)[::-1]
        found = np.concatenate(([0.0], np.cumsum(best)))
        return self.correction * found / max(len(self.trees), 1)


class Controller:
    """Decides in every step from the costs and yields of earlier steps.

    | state | next | when |
    | --- | --- | --- |
    | drafting | two plain steps | every LONGEST steps, or 2 TRIAL while the gain is uncertain |
    | all blocks, one block | the other | later blocks gain less, or more, than they cost; for \
TRIAL steps after 2 TRIAL … LONGEST |
    | drafting | paused | it lost LOSS steps in total, or prompts come to a batch without gain |
    | paused | drafting | another batch size or kind of sampling has a gain |
    | paused | trying | this kind of sampling is new |
    | paused | trying | the pause has paid for TRIAL steps, or after LONGEST; later if the last \
trial cost more than its share |
    | trying | drafting | the trial ends with a gain |
    | trying | paused | the trial ends without a gain |

    On a GPU, survival and times arrive some steps late. Tensor-parallel ranks keep the costs
    measured at start-up, since all must decide alike.
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self.paused = False
        self._yields = _Yield(), _Yield()  # greedy, sampled
        self._kind = 0, 0  # class of the batch size, sampling
        self._rate = 0.0  # λ; 0: unknown
        self._gain, self._steps = 1.0, 0
        self._rows, self._expected = 1, 0.0  # rows of the next step; expected tokens of its nodes
        self._running = 0.0  # expected tokens of the current step's
        # Share of drafters with weights in proposals; cost of prompts, per step.
        self._asked, self._prompts = 1.0, 0.0
        # Gain of later blocks per request, and the trees that it was learned from, by `_kind`.
        self._later: dict[tuple[int, int], tuple[float, int]] = {}
        # The proposal to come; whole ones in a row; all since a trial, and how many until the next.
        self._by, self._whole, self._proposals, self._wait = WHOLE, 0, 0, 2 * TRIAL
        self.selective = self._spared = False  # steps in which no node pays are plain; some were
        self._lost, self._paid = 0.0, 0.0  # lost by drafting, in plain steps; saved for trials
        self._since, self._trial = 0, 0  # steps since a trial; steps left of the current one

    def observe(self, step: Step, sampling: bool = False) -> None:
        """Learn from a step with the same requests as the next one."""
        if step.trees or not step.drafted:  # a step that only drafts is slower than a plain one
            self.cost.observe(step.rows, step.trees, step.seconds - step.draft_seconds)
        if step.drafted:
            self.cost.observe_draft(step.requests, step.by, step.draft_seconds, step.read)
            self._asked += 0.1 * ((step.by != LOOKUP) - self._asked)
        self._prompts *= 1 - 1 / HORIZON
        if step.trees and step.accepted is not None:
            self._yields[sampling].verified(self._running, step.accepted)

    def observe_prompts(self, requests: int, by: int, seconds: float) -> None:
        """Learn from a proposal that also read prompts; drafting has to win back their time."""
        reading = self.cost.of(seconds) - self.cost.draft(requests, by)
        self._prompts += max(reading, 0.0) / HORIZON

    def gain(self, requests: int, sampling: bool = False) -> float:
        """Set λ, and return the expected yield of drafting over that of plain steps."""
        known, share = self._yields[sampling], self._asked
        tokens = known.tokens()
        nodes = np.arange(len(tokens)) / max(len(known.trees), 1)
        draft = share * self.cost.draft(requests, self._by)
        draft += (1 - share) * self.cost.draft(requests, LOOKUP)
        cost = self.cost.verify(requests * (1 + nodes)) + draft + self._prompts
        spared = self._spared * np.maximum(1 - requests * nodes, 0)  # share of plain steps
        cost -= spared * (self.cost.verify(requests) - self.cost.plain(requests))
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
        later: np.ndarray | None = None,
    ) -> int:
        """Return how many nodes to verify in a step, or PLAIN.

        Args:
            survival: [R, N], descending in each row; 0 where there is no node.
            rows: of the step without nodes.
            most: nodes, at most; None: all.
            padded: [n] rows → [n] padded rows.
            later: [R, N] bool, nodes of drafters' later blocks; None: there are none.
        """
        known, kind = self._yields[sampling], _kind(requests, sampling)
        now_and_then = (self._steps + 1) % (2 * TRIAL) == 0
        best = np.sort(survival[survival > 0])[::-1][:most]
        tokens = np.concatenate(([0.0], np.cumsum(best)))
        costs = self.cost.verify(padded(rows + np.arange(len(tokens))))
        gained = known.correction * tokens
        if self.selective and self._rate and rows == requests:
            looks = now_and_then and self.cost.doubt(rows + 2, requests) > NOISE
            extra = costs - self.cost.plain(requests)
            if not looks and (gained <= self._rate * extra)[1:].all():  # a host array
                self._spared = True
                self._see(survival, requests, sampling)
                return PLAIN
        self._see(survival, requests, sampling)
        nodes = int((gained - self._rate * costs).argmax())
        if now_and_then and self.cost.doubt(rows + 2 * nodes + 2, requests) > NOISE:
            nodes = 2 * nodes + 2  # to learn the cost of more
        nodes = min(int(padded(np.array([rows + nodes]))[0]) - rows, len(best))
        self._expected, self._rows = float(tokens[nodes]), rows + nodes
        # Seldom, to save host time. On a GPU, survival is that of the proposal before the last one.
        looks = now_and_then or self._proposals > self._wait
        if later is not None and looks and self._whole > 2 and nodes:
            taken = later & (survival >= best[nodes - 1])
            sizes = rows + nodes - np.array([taken.sum(), 0])
            saved = self._rate * np.diff(self.cost.verify(sizes))[0]
            more = float(known.correction * survival[taken].sum() - saved)  # host arrays
            mean, trees = self._later.get(kind, (0.0, 0))
            trees = min(trees + requests, TREES // 4)
            self._later[kind] = mean + (more - requests * mean) / trees, trees
        return nodes

    def _see(self, survival: np.ndarray, requests: int, sampling: bool) -> None:
        """Learn from new trees."""
        known, kind = self._yields[sampling], _kind(requests, sampling)
        known.trees.extend(survival[survival[:, 0] < 1])  # 1: unknown
        self._steps += 1
        now_and_then = self._steps % (2 * TRIAL) == 0
        if now_and_then or len(known.trees) < 16 or kind != self._kind or not self._rate:
            self._gain, self._kind = self.gain(requests, sampling), kind

    def brief(self, requests: int, sampling: bool = False) -> bool:
        """Decide whether the next proposal is of the drafters' first block only."""
        kind = _kind(requests, sampling)
        mean, trees = self._later.get(kind, (0.0, 0))
        saved = self.cost.draft(requests, WHOLE) - self.cost.draft(requests, BRIEF)
        self._proposals += 1
        brief = trees >= 16 and requests * mean < self._rate * saved
        if self._proposals > self._wait:  # a trial of the other choice, to learn its cost
            brief = not brief
            if self._proposals == self._wait + TRIAL:
                self._proposals, self._wait = 0, min(2 * self._wait, LONGEST)
        self._by, self._whole = (BRIEF, 0) if brief else (WHOLE, self._whole + 1)
        return brief

    def asks(self, gained: float, requests: int, behind: int) -> bool:
        """Return whether running a drafter with weights pays, beside one without.

        It is expected to gain `gained` tokens in the next step, and has missed `behind` rows.
        """
        extra = self.cost.draft(requests, self._by) - self.cost.draft(requests, LOOKUP)
        rate = self._rate or requests / self.cost.plain(requests)
        price = rate * (extra + self.cost.read * behind / HORIZON)
        return bool(gained > price)  # host numbers

    def drafts(self, requests: int, sampling: bool = False, behind: int = 0) -> bool:
        """Decide whether this step drafts; else the next is plain. behind: missed rows."""
        before, self._kind = self._kind, _kind(requests, sampling)
        self._since, self._running = self._since + 1, self._expected
        if self._trial:
            self._paid -= self._extra(requests)  # by current estimates
        if self._trial > 1:
            self._trial -= 1
        elif self._trial or (self.paused and self._kind != before):
            if self.paused:
                self.paused = self.gain(requests, sampling) < 1
            if self._trial or not self.paused:
                self._since = self._trial = 0
        elif self.paused:
            self._paid += SHARE * self.cost.plain(requests)
            extra, known = self._extra(requests), self._yields[sampling]
            price = 0.0 if self._since >= LONGEST else TRIAL * extra
            if not known.trees or (self._paid >= price and self._since >= 8 * TRIAL):
                self._paid -= self.cost.read * behind
                self._trial = max(int(self._paid / extra), TRIAL)
                known.keep(self._trial * requests)  # of an earlier trial
        else:
            self._lost = max(0.0, self._lost + 1 - self._gain)
            doubt = self.cost.doubt(self._rows, requests)
            wait = LONGEST if np.log(self._gain) > 2 * doubt else 2 * TRIAL
            if self._lost > LOSS:
                self.paused, self._lost, self._paid, self._since = True, 0.0, 0.0, 0
            elif doubt and self._since >= wait:
                self._trial = 2  # the first still drafts at its end; the second is timed
        return self.paused == (self._trial > 0)

    def stops(self, requests: int, sampling: bool) -> bool:
        """Pause before drafters read prompts, if the batch is known to have no gain."""
        known = len(self._yields[sampling].trees) >= 16 and not (self.paused or self._trial)
        if known and self.gain(requests, sampling) < 1:
            self.paused, self._lost, self._paid, self._since = True, 0.0, 0.0, 0
        return self.paused and not self._trial

    def _extra(self, requests: int) -> float:
        """Return the additional cost of a step that drafts."""
        plain, trees = self.cost.plain(requests), float(self.cost.verify(requests))
        return max(self.cost.draft(requests, self._by) + trees - plain, 0.01 * plain)


def _kind(requests: int, sampling: bool) -> tuple[int, int]:
    """Return the class: 1, 2, 3–4, 5–8, … requests, by kind of sampling."""
    return (requests - 1).bit_length(), int(sampling)
