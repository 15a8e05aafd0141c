"""Weight updates of a drafter that serves on the host, ready in one turn and used in another."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import Staged


class HostRefresh:
    """New weights that are held beside a serving drafter; the same calls as `DeviceRefresh`.

    Differs in that the host does all of it, in two turns that take as long as it takes.

    Args:
        drafter: as `post_load.process_after_loading` leaves it.

    Attributes:
        ready: the new weights only wait for `release`.
    """

    def __init__(self, drafter: SpecBlockModel) -> None:
        self._drafter = drafter
        self._tensors: Mapping[str, Tensor] | None = None
        self._staged: Staged | None = None
        self._seconds = 0.0
        self.ready = self._held = False

    def start(self, tensors: Mapping[str, Tensor], hold: bool = False) -> None:
        """See `DeviceRefresh.start`."""
        self._tensors, self._staged = tensors, None
        self.ready, self._held = False, hold

    def release(self) -> None:
        """See `DeviceRefresh.release`."""
        self._held = False

    def turn(self) -> float | None:
        """Between two steps: make the weights ready, or let them serve.

        Returns:
            seconds that both took, once they serve; else None.

        Raises:
            RefreshError: the weights cannot serve; nothing was written.
        """
        began = time.perf_counter()
        if self._tensors is not None:
            tensors, self._tensors = self._tensors, None
            self._staged = Staged(self._drafter, tensors)
            self._seconds = time.perf_counter() - began
            self.ready = self._held
        if self._staged is None or self._held:
            return None
        self._staged.write()
        self.ready, self._staged = False, None
        return self._seconds + time.perf_counter() - began
