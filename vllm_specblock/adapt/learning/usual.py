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
    def known(self) -> tuple[float, int]:
        """The usual τ, tokens per step, and the requests that it is of."""
        return self._mean.value, self._mean.count

    def recall(self, tau: float, count: int) -> None:
        """Go on from what was `known`."""
        self._mean.value, self._mean.count = float(tau), int(count)

    def is_hard(self, tau: float) -> bool:
        """Whether a request's τ is not above that of those before it, which it then joins.

        Args:
            tau: of the request, tokens per step.
        """
        hard = not self._mean.count or tau <= self._mean.value
        self._mean.add(tau)
        return hard
