"""The trainer inside the engine: updates of the heads in slices between its steps.

For an engine without a spare processor or GPU (the paper's single-device variant). It learns what a
trainer beside the engine learns, on the engine's own device, and serving waits for each slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.link.finished import Finished
from vllm_specblock.adapt.link.folder_link import WAITING
from vllm_specblock.adapt.link.staged import StagedVersion, SwapCounts
from vllm_specblock.adapt.policy.actions import action_between, trains
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.adapt.serving.slices import SHARE, Slices
from vllm_specblock.adapt.trainer.trainer import Trainer, TrainerConfig


class EngineTrainer(SwapCounts):
    """A trainer that the engine calls as it calls a link, between two slices.

    Serving continues where training fails.

    Args:
        config: its actions are `heads`, its device is the engine's.
        share: of serving's time that slices may take.

    Raises:
        TrainError, CheckpointError: as `Trainer`.
    """

    def __init__(self, config: TrainerConfig, share: float = SHARE) -> None:
        super().__init__()
        self._waiting: deque[Finished] = deque()
        self._swap_seconds = self._told = 0.0
        with torch.inference_mode(False):  # engines load inside it, where nothing can learn
            self.trainer = Trainer(config, self)
        self._served = self.trainer.adaptation.pool.origin
        device = torch.device(config.device)

        def inside() -> AbstractContextManager[object]:
            # A stream of its own: a slice does not wait for the step before it.
            if device.type != "cuda":
                return nullcontext()
            torch.cuda.set_device(device)
            return torch.cuda.stream(torch.cuda.Stream(device))

        self.slices = Slices(self.trainer.step, share, inside)
        self._pause_by(self.slices.pause)

    # ---- what an engine asks of a link ----

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool:
        """Keep a finished request until there is time to learn from it; False: there is no room."""
        if len(self._waiting) >= WAITING or self.slices.error is not None:
            return False
        self._waiting.append(Finished(record, finished))
        return True

    def slice(self) -> None:
        """Learn for a moment between two steps, if serving can spare it."""
        self.slices.grant()

    def staged(self) -> StagedVersion | None:
        """Return the version that is to serve, once."""
        current, before = self.trainer.adaptation.pool.current, self._served
        if current is before or self.slices.error is not None:
            return None
        self._served = current
        action = action_between(before.tensors, current.tensors)
        tensors = {name: each for name, each in current.tensors.items() if trains(action, name)}
        return StagedVersion(current.number, current.parent or 0, action, tensors)

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        super().took(version, seconds)
        self._swap_seconds += seconds

    def close(self) -> None:
        """Write what was not written yet, if there is a folder for it."""
        self.slices.close()
        self._pause_by(lambda: None)  # on the caller's thread, without slices
        if self.slices.error is None:
            self.trainer.close()

    # ---- what a trainer asks of its source ----

    def next(self) -> Finished | None:
        """Return the oldest request that waits, copied: no gradient can pass through tensors of an
        engine's inference mode."""
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        record = message.record
        if record is None:
            return message
        names = ("states", "last", "tokens", "labels")
        copies = {name: getattr(record, name).clone() for name in names}
        return Finished(replace(record, **copies), message.request)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a count, see `SwapCounts`."""
        self.tally[name] += by

    def tell(self) -> None:
        """The engine reads the counts where they are."""

    def swap_seconds(self, action: Action) -> float:
        """Return what serving lost since the last call: slices, judging among them, and swaps."""
        lost = self.slices.seconds + self._swap_seconds
        since, self._told = lost - self._told, lost
        return since

    def _pause_by(self, pause: Callable[[], None]) -> None:
        adaptation = self.trainer.adaptation
        adaptation.judge.pause = adaptation.updater.pause = pause
