"""Trainer, in an engine's process or in `specblock adapt run`.

It never imports vLLM.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.adapt.learning.update import AdaptationConfig
from vllm_specblock.adapt.link.folder_link import VERSIONS, FolderSource
from vllm_specblock.adapt.policy.actions import put
from vllm_specblock.adapt.policy.bandit import PaperBandit, Schedule
from vllm_specblock.adapt.policy.gain_bandit import GainBandit
from vllm_specblock.adapt.policy.interface import Action, Always, Policy
from vllm_specblock.adapt.versions import (
    DELIVERED,
    KEPT,
    VersionFolder,
    name_of,
    number_of,
    trunk_of,
)
from vllm_specblock.drafters.common.checkpoint_files import WEIGHTS, opened
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.target import target_rows

logger = logging.getLogger("vllm.specblock")

POLL = 0.02
"""Seconds between two checks for a request."""

CANNOT_START = 2
"""Exit status of a trainer with an unusable config: restarting would not help."""

LARGEST = {"heads": Action.HEADS, "all": Action.FULL}


@dataclass(frozen=True)
class TrainerConfig(AdaptationConfig):
    """Options of a trainer; `actions` as in `AdaptConfig`.

    Attributes:
        drafter, target: their folders.
        policy: `gain`, `paper` or `always`.
        out: folder for versions; None: the link's folder, which keeps only the last one.
        seconds: minimum time between two versions in `out`.
        device: `cpu`, or `cuda:N`.
        shares_gpu: the engine serves on the same GPU, and waits for updates.
        link: folder shared with the engine that started the trainer; None: there is none.
    """

    drafter: str
    target: str
    policy: str = "gain"
    actions: str = "heads"
    out: str | None = None
    seconds: float = 0.0
    device: str = "cpu"
    shares_gpu: bool = False
    threads: int = 1
    link: str | None = None


def policy_of(config: TrainerConfig) -> Policy:
    """Return the policy of a config; raises TrainError if there is none of that name."""
    if config.actions not in LARGEST:
        raise TrainError(f"actions is {config.actions!r}, but must be heads or all.")
    largest = LARGEST[config.actions]
    schedule = Schedule(buffer=config.every, largest=largest)
    match config.policy:
        case "gain":
            return GainBandit(schedule)
        case "paper":
            return PaperBandit(schedule, config.seed)
        case "always":
            return Always(largest, config.every)
    raise TrainError(f"There is no policy {config.policy!r}: choose one of gain, paper, always.")


class Trainer:
    """Learns from the requests of a source, and writes the version to serve to a folder.

    Raises:
        TrainError: the drafter, the target, the policy or `out` cannot be used.
        CheckpointError: as `checkpoint.load`.
    """

    def __init__(self, config: TrainerConfig, source: FolderSource) -> None:
        self.source, self.config = source, config
        policy = policy_of(config)
        paths = Path(config.drafter), Path(config.target)
        self.folder = VersionFolder(Path(config.out or f"{config.link}/{VERSIONS}"), *paths)
        if config.link is None:  # else the engine holds the lock
            self.folder.lock()
        drafter = checkpoint.load(config.drafter, torch.float32, config.device)
        self._columns = drafter.config.target_hidden_size
        ids = torch.arange(drafter.config.draft_vocab_size, device=config.device)
        teacher = RecordTeacher(
            target_rows.embedding_rows(paths[1]),
            target_rows.head_rows(paths[1], ids + drafter.d2t[ids]),
            config.device,
        )
        self.adaptation = Adaptation(
            drafter, teacher, policy, config, source.count, self._seconds_lost
        )
        self.adaptation.number = max(map(number_of, self.folder.names()), default=0)
        with opened(paths[0] / WEIGHTS) as file:
            dtype = file.get_tensor("lm_head.weight").dtype
        self._drafter = copy.deepcopy(drafter).to("cpu", dtype)  # holds what is written
        self._delivered = trunk_of(self._drafter)
        # The current version of the folder; None: unknown.
        self._written: Version | None = self.adaptation.pool.origin
        self._wrote = float("-inf")
        self._known = 0  # stamp of the last choice, here or elsewhere
        self._exchange()
        source.tell()

    def step(self) -> bool:
        """Learn from a waiting request and write the result; return whether there was one."""
        message = self.source.next()
        if message is not None:
            if message.record is None or self._fits(message.record):
                self.adaptation.finish(message.record, message.request)
            else:
                self.source.count("dropped_records", 1)
        self._exchange()
        if message is not None:
            self.source.tell()
        return message is not None

    def close(self) -> None:
        """Write the last version."""
        self._write()
        self.folder.unlock()

    def _seconds_lost(self, action: Action, seconds: float) -> float:
        return self.source.swap_seconds(action) + seconds * self.config.shares_gpu

    def _fits(self, record: Record) -> bool:
        columns = (record.states.shape[1], record.last.shape[1])
        return columns == (3 * self._columns, self._columns)

    def _exchange(self) -> None:
        """Adopt a version that another process chose, and write the one to serve."""
        stamp = self.folder.stamp()
        if stamp != self._known:
            self._known = stamp
            self._adopt_chosen()
        if time.monotonic() - self._wrote >= self.config.seconds:
            self._write()

    def _adopt_chosen(self) -> None:
        try:
            name = self.folder.current()
            tensors = {} if name is None else self.folder.read(name)
        except TrainError as error:
            if self.folder.stamp() == self._known:  # else the next call adopts another one
                self._written = None
                logger.warning(
                    "SpecBlock adaptation: the current version in %s is skipped, since it "
                    "cannot be used: %s",
                    self.folder.out,
                    error,
                )
            return
        self._written = self.adaptation.pool.origin
        if name is not None:
            weights = {name: each.float() for name, each in tensors.items()}
            self._written = Version(number_of(name), weights, Action.FULL)
        self.adaptation.adopt(self._written)

    def _write(self) -> None:
        """Write and select the version to serve, if it changed."""
        version = self.adaptation.pool.current
        if version is self._written:
            return
        self._written, self._wrote = version, time.monotonic()
        try:
            name = name_of(version.number)
            if name is not None and name not in self.folder.names():
                put(self._drafter, version.tensors)
                self.folder.write(self._drafter, self._facts(version), version.number)
            self.folder.use(name)
            self._known = self.folder.stamp()
            self.folder.prune(KEPT if self.config.out is not None else 1)
        except (OSError, SafetensorError, TrainError) as error:
            logger.warning(
                "SpecBlock adaptation: %s cannot be written to (%s): versions are not kept.",
                self.folder.out,
                error,
            )

    def _facts(self, version: Version) -> dict[str, Any]:
        """What is known of the version that `self._drafter` holds."""
        gain, trunk = self.adaptation.gain_over_origin(version), trunk_of(self._drafter)
        return {
            "parent": name_of(version.parent or 0),
            "action": str(version.action),
            "rows": self.adaptation.rows,
            "gain": None if gain != gain else round(gain, 4),
            "trunk": DELIVERED if trunk == self._delivered else trunk,
        }


def serve(config: TrainerConfig) -> int:
    """Learn until the engine stops the process; return the exit status."""
    assert config.link is not None
    torch.set_num_threads(config.threads)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's business
    try:
        trainer = Trainer(config, FolderSource(Path(config.link)))
    except (TrainError, CheckpointError) as error:
        print(f"SpecBlock adaptation: {error}", file=sys.stderr)
        return CANNOT_START
    while not told.is_set():
        if not trainer.step():
            time.sleep(POLL)
    trainer.close()
    return 0


def _end_with(engine: int, link: str) -> None:
    """Exit with the engine, also after `kill -9`, and remove the shared folder."""
    while os.getppid() == engine:
        time.sleep(0.2)
    shutil.rmtree(link, ignore_errors=True)
    os._exit(0)


def main() -> int:
    """Process of an engine's trainer; arguments: its config as JSON, and the engine's id."""
    config, engine = TrainerConfig(**json.loads(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(engine, config.link), daemon=True).start()
    return serve(config)


if __name__ == "__main__":
    sys.exit(main())
