"""Which requests a drafter has something to learn from."""

from __future__ import annotations

from vllm_specblock.adapt.slow_mean import SlowMean

EASY = 1.2
"""Share of the usual τ above which a request is an easy one. Requests of one kind differ by about a
fifth of it, and most are hard; of two kinds, mixed, those that the drafter knows are easy. At 1,
half are easy wherever texts are of one kind, and a new domain is learned more slowly."""

SLOW = 1 / 256
"""Weight of a request in what is usual, behind the first 256, which count alike: slow, so that all
texts of another domain are hard until most of it is learned."""


class Usual:
    """The usual τ of a stream, and whether a request is hard beside it."""

    def __init__(self) -> None:
        self._mean = SlowMean(SLOW)

    @property
    def tau(self) -> float:
        """Tokens per step; 0 before any request."""
        return self._mean.value

    def is_hard(self, tau: float) -> bool:
        """Whether a request's τ is not far above that of those before it, which it then joins.

        Args:
            tau: of the request, tokens per step.
        """
        hard = not self._mean.count or tau <= EASY * self.tau
        self._mean.add(tau)
        return hard
