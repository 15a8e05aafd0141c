"""Lazy routing: the second drafter is asked only where the first one is not sure enough.

What is sure enough is learned while serving, on the device and without a random state. Requests
are sorted into buckets by how sure the first drafter is; for each the gate keeps how many tokens
were accepted with the first drafter alone and with both. What is learned fades, since texts change.
"""

from __future__ import annotations

import torch

from vllm_specblock.combine.route import How
from vllm_specblock.triton_kernels.feedback.lazy_gate import GateState

BUCKETS = 16
"""Half octaves of confidence: means of many nodes' probabilities are small, most below 0.2."""

_LARGEST = {"mean": 0, "sum": 5}
"""Power of two from which on confidences are one bucket: a probability, a number of tokens."""

_EXPLORE_BITS = 4
"""One request in 2^4 does the opposite of what the gate holds best."""

_SPREAD = -7046029254386353131
"""2^64 over the golden ratio, as an int64: products' top bits visit every value equally often,
also for keys in steps."""


class LazyGate:
    """Decides, request by request, whether the second drafter drafts.

    It does below a threshold of the first drafter's confidence. Of all B + 1 bucket edges the
    threshold is the one with the most tokens per time: Σ share · (1 + accepted) over the buckets,
    by 1 + cost · (share of requests that draft both).

    All shapes are fixed, the state is changed in place, and no value is read on the host.

    Attributes (B buckets; index 0: the first drafter alone, 1: both):
        steps: [2, B] fp32, verified trees, older ones counting less.
        accepted: [2, B] fp32, draft tokens accepted of them.
        threshold: [] int64, first bucket for which the first drafter alone will do; B: none.

    Args:
        device: where all of it lies.
        how: what confidences are, see `route.confidence`.
        cost: what drafting the second drafter adds to a step, as a fraction of its time.
        decay: what a step counts one step later. The default forgets half in 700 steps.
    """

    def __init__(
        self,
        device: torch.device | str,
        how: How = "mean",
        cost: float = 0.15,
        decay: float = 0.999,
    ) -> None:
        self.cost, self.decay = cost, decay
        self.steps = torch.zeros(2, BUCKETS, device=device)
        self.accepted = torch.zeros(2, BUCKETS, device=device)
        self.threshold = torch.full((), BUCKETS, device=device)
        self._offset = BUCKETS - 2 * _LARGEST[how]
        self._cell = torch.arange(2 * BUCKETS, device=device)

    @property
    def state(self) -> GateState:
        """What the kernels take: they decide and learn on a GPU, in a launch each."""
        return GateState(
            self.steps,
            self.accepted,
            self.threshold,
            self._offset,
            self.cost,
            self.decay,
            _SPREAD,
            _EXPLORE_BITS,
        )

    def wants(self, confidence: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether the second drafter is to draft.

        Args:
            confidence: [R] fp32, of the first drafter's trees. 0, an empty tree, is never enough.
            key: [R] int64, anything that changes from step to step, such as the position: by
                its hash one in 16 tries the opposite, so that both ways stay known.

        Returns:
            [R] bool.
        """
        explores = (key * _SPREAD) >> (64 - _EXPLORE_BITS) == 0
        unsure = self.bucket(confidence) < self.threshold
        return (unsure ^ explores) | (confidence == 0)

    def learn(
        self,
        confidence: torch.Tensor,
        drafted_both: torch.Tensor,
        accepted: torch.Tensor,
        live: torch.Tensor,
    ) -> None:
        """Take note of one step, and move the threshold.

        Args:
            confidence: [R] fp32, what `wants` was asked with.
            drafted_both: [R] bool, the second drafter did draft.
            accepted: [R] int, draft tokens accepted.
            live: [R] bool, a tree was verified. The others' values are not looked at.
        """
        # Where the first drafter has nothing there is no choice, and nothing to learn.
        counts = live & (confidence > 0)
        cell = drafted_both * BUCKETS + self.bucket(confidence)
        hit = ((cell[:, None] == self._cell) & counts[:, None]).float()  # [R, 2B]
        keep = torch.where(counts.any(), self.decay, 1.0)
        self.steps.mul_(keep).add_(hit.sum(0).view(2, BUCKETS))
        gained = (accepted[:, None] * hit).sum(0)
        self.accepted.mul_(keep).add_(gained.view(2, BUCKETS))
        self.threshold.copy_(self._best())

    def bucket(self, confidence: torch.Tensor) -> torch.Tensor:
        """[R] fp32 → [R] int64, 0 … B − 1, ascending with confidence."""
        half_octave = (2 * confidence.log2()).floor() + self._offset
        return half_octave.clamp(0, BUCKETS - 1).long()

    def _best(self) -> torch.Tensor:
        """[] int64, the threshold of the highest rate; the largest of equals.

        Every estimate starts from one imagined step. With both drafters it accepts what the
        bucket's steps do on average, and twice the tokens that the second drafter's time costs:
        where little is known, both are drafted until they are seen not to be worth it.
        """
        steps, accepted = self.steps.sum(0), self.accepted.sum(0)  # [B], of both ways
        usual = (accepted + 1) / (steps + 1)
        rate = 1 + (accepted.sum() + 1) / (steps.sum() + 1)
        hope = torch.stack([usual, usual + 2 * self.cost * rate])
        alone, both = (1 + (self.accepted + hope) / (self.steps + 1)).unbind()

        share = steps + 1 / BUCKETS
        # [2, B+1]: what every threshold gains in tokens, and how many steps draft both.
        added = torch.stack([share * (both - alone), share]).cumsum(1)
        gain, drafts = torch.nn.functional.pad(added, (1, 0)).unbind()
        per_time = ((share * alone).sum() + gain) / (share.sum() + self.cost * drafts)
        return BUCKETS - per_time.flip(0).argmax()
