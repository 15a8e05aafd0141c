"""A pair of folders, and requests from which a drafter learns within a few updates."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.records import HIDDEN, small_drafter

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.adapt.link.folder_link import (
    FolderLink,
    FolderVersions,
    make_shared_folder,
    shared_folder,
)
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.adapt.versions import StagedVersion, VersionFolder
from vllm_specblock.train import saving

VOCAB = 32


@dataclass
class Pair:
    """Folders of a drafter and its target, in which the next token is a function of the last."""

    drafter: Path
    target: Path
    table: torch.Tensor

    @classmethod
    def make(cls, folder: Path, seed: int = 3) -> Pair:
        draw = torch.Generator().manual_seed(0)
        table = torch.randn(VOCAB, HIDDEN, generator=draw)
        head = torch.nn.functional.normalize(table, dim=1)
        made = cls(folder / "drafter", folder / "target", table)
        saving.save(small_drafter(seed, vocab=VOCAB), made.drafter)
        made.target.mkdir()
        sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_attention_heads": 4}
        (made.target / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 8}))
        weights = {"model.embed_tokens.weight": table, "lm_head.weight": head}
        save_file(weights, made.target / "model.safetensors")
        return made

    @classmethod
    def at(cls, folder: Path) -> Pair:
        """The pair that was made in a folder."""
        return cls(folder / "drafter", folder / "target", torch.empty(0))

    def versions(self, out: Path) -> VersionFolder:
        return VersionFolder(out, self.drafter, self.target)

    def link(self, out: Path | None = None) -> FolderLink:
        """The engine's end of a folder in shared memory; out: of versions."""
        token = secrets.randbits(62)
        lock, folder = make_shared_folder(token, 1 << 24), shared_folder(token)
        return FolderLink(folder, self.versions(out or folder / "versions"), 1 << 24, 64, lock)

    @property
    def teacher(self) -> RecordTeacher:
        return RecordTeacher(self.table, torch.nn.functional.normalize(self.table, dim=1))

    def record(self, number: int, rows: int = 40, prompt: int = 8) -> Record:
        draw = torch.Generator().manual_seed(number)
        mix = torch.randn(HIDDEN, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
        first = int(torch.randint(VOCAB, (1,), generator=draw))
        tokens = (first + 5 * torch.arange(rows + 1)) % VOCAB
        noise = 0.1 * torch.randn(rows, HIDDEN, generator=draw)
        head = torch.nn.functional.normalize(self.table, dim=1)
        return Record(
            f"request {number}",
            (self.table[tokens[:-1]] + noise) @ mix / HIDDEN**0.5,
            6 * head[tokens[1:]] + noise,
            tokens[1:],
            torch.arange(rows) >= prompt,
            (rows - prompt) / 10,
        )

    def request(self, number: int) -> tuple[Record, FinishedRequest]:
        record = self.record(number)
        return record, FinishedRequest(4.0, 10, int(record.labels.sum()), 0.5)


def staged(link: FolderVersions) -> StagedVersion | None:
    """What the engine sees once its thread has looked."""
    link._look()
    return link.staged() or link.current()


def wait(what: Callable[[], Any], seconds: float = 240.0) -> Any:
    """What `what` returns, once that is true."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.02)
    return found
