"""The trainer inside the engine: updates of the heads in slices between its steps.

For an engine that has no processor and no other GPU to spare (the paper's single-device variant).
It learns what a trainer beside the engine learns, from the same book and by the same policies, but
on the engine's own device, and serving waits for each slice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.learning.trunk_states import TrunkStates
from vllm_specblock.adapt.link.layout import COUNTS
from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.link.wire import Finished
from vllm_specblock.adapt.policy.actions import action_between, trains
from vllm_specblock.adapt.policy.interface import Action, FinishedRequest
from vllm_specblock.adapt.trainer.slices import SHARE, Slices
from vllm_specblock.adapt.trainer.trainer import Trainer, TrainerConfig

WAITING = 16
"""Finished requests that may wait to be learned from; what comes then is not recorded."""


class EngineTrainer:
    """Differs from a link to another process in that it is the trainer, too.

    What an engine calls on a link is called here on its thread, between two slices. Where training
    has failed, nothing is taken any more and serving goes on.

    Args:
        config: see `TrainerConfig`; actions are `heads`, the device is the engine's.
        share: of serving's time that slices may take.

    Raises:
        TrainError, CheckpointError: as `Trainer`.
    """

    def __init__(self, config: TrainerConfig, share: float = SHARE) -> None:
        self._counts = Counter(dict.fromkeys(COUNTS, 0))
        self._waiting: deque[Finished] = deque()
        self._swap_seconds = self._told = 0.0
        with torch.inference_mode(False):  # engines load inside it; what learns may not be made so
            self.trainer = Trainer(config, self)
        judge = self.trainer.adaptation.judge
        judge.states = TrunkStates(self.trainer.adaptation.pool.origin.tensors)
        self._served = self.trainer.adaptation.pool.origin
        device = torch.device(config.device)

        def inside() -> AbstractContextManager[object]:
            # What a step waits for on its own stream is no concern of what is learned beside it.
            if device.type != "cuda":
                return nullcontext()
            torch.cuda.set_device(device)
            return torch.cuda.stream(torch.cuda.Stream(device))

        self.slices = Slices(self.trainer.step, share, inside)
        self._pause_by(self.slices.pause)

    # ---- what an engine asks of a link ----

    def offer(self, record: Record | None, finished: FinishedRequest | None) -> bool:
        """Keep a finished request until there is time to learn from it.

        Returns:
            whether there was room.
        """
        if len(self._waiting) >= WAITING or self.slices.error is not None:
            return False
        self._waiting.append(Finished(record, finished))
        return True

    def slice(self) -> None:
        """Between two steps: learn for a moment, if serving can spare it."""
        self.slices.grant()

    def staged(self) -> StagedVersion | None:
        """The version that is to serve, where that is another than was given last."""
        current, before = self.trainer.adaptation.pool.current, self._served
        if current is before or self.slices.error is not None:
            return None
        self._served = current
        self._counts["versions_offered"] += 1
        return _staged(current, before)

    def took(self, version: StagedVersion, seconds: float = 0.0) -> None:
        """A version serves from now on; the swap took `seconds` from serving."""
        self._swap_seconds += seconds
        self._counts["swaps"] += 1
        self._counts["swap_microseconds"] += round(1e6 * seconds)

    def refuse(self, version: StagedVersion, reason: str = "not finite") -> None:
        """A version cannot serve."""
        self._counts[f"versions_refused_{reason.replace(' ', '_')}"] += 1

    @property
    def counts(self) -> dict[str, int]:
        """By `COUNTS`."""
        return dict(self._counts)

    def close(self) -> None:
        """Write what was not written yet, if there is a folder for it."""
        self.slices.close()
        self._pause_by(lambda: None)  # on the caller's thread, who has the time
        if self.slices.error is None:
            self.trainer.close()

    # ---- what a trainer asks of its source ----

    def next(self) -> Finished | None:
        """The oldest request that waits. Its tensors come from an engine's step, whose inference
        mode keeps gradients from everything that touches them: so they are copied."""
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        record = message.record
        if record is None:
            return message
        record = replace(
            record,
            states=record.states.clone(),
            last=record.last.clone(),
            tokens=record.tokens.clone(),
            labels=record.labels.clone(),
        )
        return Finished(record, message.request)

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of `COUNTS`."""
        self._counts[name] += by

    def swap_seconds(self, action: Action) -> float:
        """What serving lost since this was asked last: slices, judging among them, and swaps."""
        lost = self.slices.seconds + self._swap_seconds
        since, self._told = lost - self._told, lost
        return since

    def _pause_by(self, pause: Callable[[], None]) -> None:
        adaptation = self.trainer.adaptation
        adaptation.judge.pause = adaptation.updater.pause = pause


def _staged(version: Version, before: Version) -> StagedVersion:
    """What of a version the drafter lacks that serves `before`."""
    action = action_between(before.tensors, version.tensors)
    tensors = {name: each for name, each in version.tensors.items() if trains(action, name)}
    parent = -1 if version.parent is None else version.parent
    return StagedVersion(version.number, parent, action, tensors)
