"""Trainer, in an engine's process or in `specblock adapt run`.

It never imports vLLM.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.adapt.learning.update import AdaptationConfig, recipe
from vllm_specblock.adapt.link.folder_link import VERSIONS, FolderSource
from vllm_specblock.adapt.policy.interface import EVERY, Action
from vllm_specblock.adapt.policy.registry import make_policy
from vllm_specblock.adapt.trainer.version_writer import VersionWriter
from vllm_specblock.adapt.versions import KEPT, VersionFolder
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
class TrainerConfig:
    """Options of a trainer.

    Attributes:
        drafter, target: their folders.
        policy: see `policy.registry.make_policy`.
        actions: the largest update: `heads`, or `all`.
        lr, every, memory: see `AdaptConfig`.
        num_blocks: M of serving.
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
    lr: float | None = None
    num_blocks: int = 2
    every: int = EVERY
    memory: float = 512
    out: str | None = None
    seconds: float = 0.0
    device: str = "cpu"
    shares_gpu: bool = False
    threads: int = 1
    seed: int = 0
    link: str | None = None


class Trainer:
    """Learns from the requests of a source, and writes the version to serve to a folder.

    Raises:
        TrainError: the drafter, the target, the policy or `out` cannot be used.
        CheckpointError: as `checkpoint.load`.
    """

    def __init__(self, config: TrainerConfig, source: FolderSource) -> None:
        self.source, self._shares_gpu = source, config.shares_gpu
        if config.actions not in LARGEST:
            raise TrainError(f"actions is {config.actions!r}, but must be heads or all.")
        policy = make_policy(config.policy, config.seed, LARGEST[config.actions], config.every)
        paths = Path(config.drafter), Path(config.target)
        folder = VersionFolder(Path(config.out or f"{config.link}/{VERSIONS}"), *paths)
        if config.link is None:  # else the engine holds the lock
            folder.lock()
        drafter = checkpoint.load(config.drafter, torch.float32, config.device)
        self._columns = drafter.config.target_hidden_size
        ids = torch.arange(drafter.config.draft_vocab_size, device=config.device)
        teacher = RecordTeacher(
            target_rows.embedding_rows(paths[1]),
            target_rows.head_rows(paths[1], drafter.target_ids(ids)),
            config.device,
        )
        self.adaptation = Adaptation(
            drafter,
            teacher,
            policy,
            AdaptationConfig(
                config.lr,
                recipe=recipe(config.num_blocks),
                memory=config.memory,
                every=config.every,
                seed=config.seed,
            ),
            source.count,
            self._seconds_lost,
        )
        keep = KEPT if config.out is not None else 1
        self.writer = VersionWriter(folder, drafter, self.adaptation, config.seconds, keep)
        self.writer.exchange()
        source.tell()

    def step(self) -> bool:
        """Learn from a waiting request and write the result; return whether there was one."""
        message = self.source.next()
        if message is not None:
            if message.record is None or self._fits(message.record):
                self.adaptation.finish(message.record, message.request)
            else:
                self.source.count("dropped_records", 1)
        self.writer.exchange()
        if message is not None:
            self.source.tell()
        return message is not None

    def close(self) -> None:
        """Write the last version."""
        self.writer.write(now=True)
        self.writer.folder.unlock()

    def _seconds_lost(self, action: Action, seconds: float) -> float:
        return self.source.swap_seconds(action) + seconds * self._shares_gpu

    def _fits(self, record: Record) -> bool:
        columns = (record.states.shape[1], record.last.shape[1])
        return columns == (3 * self._columns, self._columns)


def serve(config: TrainerConfig) -> int:
    """Learn until the engine stops the process; return the exit status.

    Args:
        config: must have a link.
    """
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
