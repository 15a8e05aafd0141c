"""A pair of folders, and requests from which a drafter learns within a few updates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.records import HIDDEN, small_drafter

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.learning.train_batches import RecordTeacher
from vllm_specblock.adapt.link.layout import LinkSizes, shapes_of
from vllm_specblock.adapt.link.memory_link import EngineLink
from vllm_specblock.adapt.link.staging import StagedVersion
from vllm_specblock.adapt.policy.interface import FinishedRequest
from vllm_specblock.drafters.specblock import checkpoint

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
        checkpoint.save(small_drafter(seed, vocab=VOCAB), made.drafter)
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

    @property
    def sizes(self) -> LinkSizes:
        return LinkSizes(shapes_of(checkpoint.read_config(self.drafter)), HIDDEN, slots=64)

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
            misses=4.0,
            steps=10,
            committed=rows - prompt,
        )

    def request(self, number: int) -> tuple[Record, FinishedRequest]:
        record = self.record(number)
        return record, FinishedRequest(record.misses, record.steps, record.committed, 0.5)


def staged(link: EngineLink) -> StagedVersion | None:
    """What the engine sees, after the thread that reads it is done."""
    found = link.staged()
    if found is None and link._reader is not None:
        link._reader.join()
        found = link.staged()
    return found
