"""The trainer: a process beside the engine, or on another machine with the folder of requests.

`TrainerProcess` starts it as `python -m vllm_specblock.adapt`; `specblock adapt run` runs the same
loop over a folder. It never imports vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from vllm_specblock.adapt.adaptation import BATCH, Adaptation, AdaptationConfig
from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.adapt.learning.update import UpdateConfig, recipe
from vllm_specblock.adapt.link.layout import BEAT, SILENCE, shapes_of
from vllm_specblock.adapt.link.memory_link import TrainerLink
from vllm_specblock.adapt.link.wire import Finished
from vllm_specblock.adapt.policy.interface import EVERY, Action
from vllm_specblock.adapt.policy.registry import serving_policy
from vllm_specblock.adapt.trainer import state
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.adapt.write_versions import VersionWriter
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.target import target_rows

logger = logging.getLogger("vllm.specblock")

POLL = 0.02
"""Seconds between two looks for a request."""

LOOK = 1.0
"""Seconds between two looks for what a person chose, and for what is to be written."""

LARGEST = {"heads": Action.HEADS, "all": Action.FULL}


@dataclass(frozen=True)
class TrainerConfig:
    """What a trainer is told.

    Attributes:
        drafter, target: folders, as delivered.
        policy: see `policy.registry.serving_policy`.
        actions: the largest update: `heads`, or `all`.
        lr: constant rate of a full update; heads take three times it. None: by the drafter's width.
        anchor: λ of the KL to the drafter as delivered.
        num_blocks: M that serving drafts: others would be learned, and judged, for nobody.
        every: finished requests that make an update.
        batch: records of a batch, half of them new.
        memory: of recorded rows, MiB.
        out: folder for versions and the trainer's state; None: nothing is written.
        seconds: between two writings at least.
        device: `cpu`, or `cuda:N`, which no other process computes on.
        threads: of the processor.
        seed: of samples and exploration.
    """

    drafter: str
    target: str
    policy: str = "gain"
    actions: str = "heads"
    lr: float | None = None
    anchor: float = 0.0
    num_blocks: int = 2
    every: int = EVERY
    batch: int = BATCH
    memory: float = 512
    out: str | None = None
    seconds: float = 600
    device: str = "cpu"
    threads: int = 1
    seed: int = 0

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainerConfig:
        """What `to_json` gave."""
        return cls(**json.loads(text))


class Source(Protocol):
    """Where finished requests come from: `TrainerLink`, `FolderSource`, or the engine itself."""

    def next(self) -> Finished | None: ...

    def count(self, name: str, by: int = 1) -> None: ...

    def swap_seconds(self, action: Action) -> float: ...


class Trainer:
    """Learns from the requests of a source, and offers versions.

    Over a link, `pool.current` is staged as soon as it is another, and the last good version goes
    to `out`. Over a folder the current one goes to `out`: that is how the engine gets it. In the
    engine's own process that looks at `pool.current`, and it goes to `out`, too. Where the
    policy only watches, the version that `out` says is current is judged, whoever writes there, and
    neither staged nor written.

    Args:
        config: see `TrainerConfig`.
        source: of requests.
        lock: inherited descriptor of the lock of `out`.

    Raises:
        TrainError: the drafter, the target, the policy or `out` cannot be used.
        CheckpointError: as `checkpoint.load`.
    """

    def __init__(self, config: TrainerConfig, source: Source, lock: int | None = None) -> None:
        self.config, self.source = config, source
        self.link = source if isinstance(source, TrainerLink) else None
        if config.actions not in LARGEST:
            raise TrainError(f"actions is {config.actions!r}, but must be heads or all.")
        policy = serving_policy(config.policy, config.seed, LARGEST[config.actions], config.every)
        out = Path(config.out) if config.out else None
        folder = out and VersionFolder(out, Path(config.drafter), Path(config.target))
        if folder and policy.trains:
            folder.lock(lock)
        drafter = checkpoint.load(config.drafter, torch.float32, config.device)
        self._columns = drafter.config.target_hidden_size
        ids = torch.arange(drafter.config.draft_vocab_size, device=config.device)
        teacher = RecordTeacher(
            target_rows.embedding_rows(Path(config.target)),
            target_rows.head_rows(Path(config.target), drafter.target_ids(ids)),
            config.device,
        )
        self.adaptation = Adaptation(
            drafter,
            teacher,
            policy,
            AdaptationConfig(
                UpdateConfig(config.lr, anchor=config.anchor, recipe=recipe(config.num_blocks)),
                memory=config.memory,
                batch=config.batch,
                every=config.every,
                seed=config.seed,
            ),
            source.count,
            source.swap_seconds,
        )
        self.writer = folder and VersionWriter(folder, drafter, self.adaptation, config.seconds)
        self._staged: Version | None = self.adaptation.pool.origin
        self._looked = time.monotonic()
        self._begin()

    def step(self) -> bool:
        """Learn from one request, if one waits; offer what came of it. Returns whether one did."""
        message = self.source.next()
        if message is not None:
            if message.record is None or self._fits(message.record):
                self.adaptation.finish(message.record, message.request)
            else:
                self.source.count("dropped_records", 1)
        if self.writer and time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self._choose()
            if self.adaptation.policy.trains:
                self.writer.write(self._to_write())
        self._offer()
        return message is not None

    def run(self, ends: Callable[[], bool]) -> None:
        """Until told to end; then what was learned is written, if there is a folder for it."""
        while not ends():
            if not self.step():
                time.sleep(POLL)
        self.close()

    def close(self) -> None:
        """Write what was not written yet."""
        if self.writer and self.adaptation.policy.trains:
            self.writer.write(self._to_write(), now=True)
            self.writer.folder.unlock()

    def _begin(self) -> None:
        """Go on from what is known of before: the link, then the folder."""
        adaptation, origin = self.adaptation, self.adaptation.pool.origin
        if self.link:
            staging = self.link.staging
            adaptation.number = max(self.link.serves, staging.number)
            found = staging.recover(origin.tensors)
            if found and found.number:
                self._staged = found
                adaptation.adopt(found)
            elif staging.sequence == 0:
                staging.know(origin.tensors)
            else:
                # What an earlier trainer staged is torn: all is staged again, θ_0 if need be.
                self._staged = None
        if self.writer:
            if adaptation.pool.current is origin:
                self._choose()
            else:
                self.writer.know()  # what serves is newer
            try:
                if self.adaptation.policy.trains and not self.writer.chosen_since():
                    state.restore(self.writer.folder.out, adaptation, self.writer.fingerprints)
            except TrainError as error:
                logger.warning("SpecBlock adaptation: %s", error)
        self._offer()

    def _choose(self) -> None:
        """Take up what current.json says, where the writer did not write that."""
        if self.writer and (version := self.writer.chosen()):
            self.adaptation.adopt(version, good=True)

    def _offer(self) -> None:
        current = self.adaptation.pool.current
        trains = self.adaptation.policy.trains
        if self.link and trains and current is not self._staged:
            self.link.stage(current)
            self._staged = current

    def _to_write(self) -> Version:
        pool = self.adaptation.pool
        return pool.good if self.link and self.adaptation.policy.gated else pool.current

    def _fits(self, record: Record) -> bool:
        columns = (record.states.shape[1], record.last.shape[1])
        return columns == (3 * self._columns, self._columns)


def serve(arguments: Sequence[str]) -> int:
    """The process: learn until the engine ends.

    Args:
        arguments: the config as JSON, the descriptors of the memory and of the lock (−1: none),
            and the engine's process id.

    Returns:
        the exit status: 2 where the config cannot be followed, so that trying again is of no use.
    """
    config = TrainerConfig.from_json(arguments[0])
    descriptor, lock, parent = map(int, arguments[1:])
    torch.set_num_threads(config.threads)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's business
    try:
        link = TrainerLink(descriptor, shapes_of(checkpoint.read_config(config.drafter)))
        threading.Thread(target=_live, args=(link, parent), daemon=True).start()
        trainer = Trainer(config, link, None if lock < 0 else lock)
    except (TrainError, checkpoint.CheckpointError) as error:
        print(f"SpecBlock adaptation: {error}", file=sys.stderr)
        return 2
    trainer.run(lambda: link.closed or told.is_set())
    return 0


def _live(link: TrainerLink, parent: int) -> None:
    """Say that the trainer lives, for as long as the engine does."""
    while os.getppid() == parent and link.silence < SILENCE:
        link.beat()
        time.sleep(BEAT)
    os._exit(0)
