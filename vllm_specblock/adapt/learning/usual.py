"""Which requests a drafter has more to learn from than from others."""

from __future__ import annotations

from vllm_specblock.adapt.slow_mean import SlowMean

SLOW = 1 / 256
"""Weight of a request in what is usual, behind the first 256, which count alike: slow, so that all
texts of another domain are hard until most of it is learned."""


class Usual:
    """The usual τ of a stream, and whether a request is hard beside it.

    Of texts of one kind half are hard; of two kinds, mixed, those that the drafter knows less.
    """

    def __init__(self) -> None:
        self._mean = SlowMean(SLOW)

    @property
    def tau(self) -> float:
        """Tokens per step; 0 before any request."""
        return self._mean.value

    def is_hard(self, tau: float) -> bool:
        """Whether a request's τ is not above that of those before it, which it then joins.

        Args:
            tau: of the request, tokens per step.
        """
        hard = not self._mean.count or tau <= self.tau
        self._mean.add(tau)
        return hard
