"""Weight updates spread over several steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.refresh import RefreshError, prepare, swap_in


class Refresh:
    """A weight update spread over several steps; on a GPU a thread prepares it.

    Attributes:
        ready: the new weights are prepared, and held until `release`.
    """

    def __init__(self, drafter: SpecBlockModel) -> None:
        self._drafter = drafter
        on_gpu = drafter.norm.weight.is_cuda
        self._pool = ThreadPoolExecutor(1, "specblock-refresh") if on_gpu else None
        self._coming: Future[nn.Module] | None = None
        self._seconds = 0.0
        self.ready = self._held = False

    def start(self, tensors: Mapping[str, Tensor], hold: bool = False) -> None:
        """Start an update; it replaces an earlier one that does not serve yet.

        Args:
            tensors: as for `prepare`, on the host; must not change.
            hold: do not swap before `release`.
        """
        began = time.perf_counter()
        self.ready, self._held = False, hold
        if self._pool is not None:
            self._coming = self._pool.submit(_prepare_pinned, self._drafter, tensors)
        else:
            self._coming = Future()
            try:
                self._coming.set_result(prepare(self._drafter, tensors))
            except RefreshError as error:
                self._coming.set_exception(error)
        self._seconds = time.perf_counter() - began

    def release(self) -> None:
        """Swap the held weights in at the next `turn`."""
        self.ready = self._held = False

    def turn(self) -> float | None:
        """Continue between two steps, on their stream; once it serves, return the seconds taken.

        Raises:
            RefreshError: the weights cannot serve; nothing was written.
        """
        if self._coming is None or not self._coming.done():
            return None
        began = time.perf_counter()
        try:
            fresh = self._coming.result()
        except RefreshError:
            self._coming = None
            raise
        self.ready = self._held
        if self._held:
            return None
        swap_in(self._drafter, fresh)
        self._coming = None
        return self._seconds + time.perf_counter() - began


def _prepare_pinned(drafter: SpecBlockModel, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Prepare weights for a GPU in pinned host memory, beside the steps."""
    try:
        return prepare(drafter, tensors, torch.device("cpu"))._apply(Tensor.pin_memory)
    except RefreshError:
        raise
    except Exception as error:  # a failed update must not stop the engine
        raise RefreshError(f"The new weights could not be prepared ({error!r}).") from error
