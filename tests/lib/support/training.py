"""A target and text that a drafter learns something from in a few updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.targets import tiny_target

from vllm_specblock.train.config import RunConfig, TrainConfig, parse
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.shards import Text
from vllm_specblock.train.loop import Trainer

VOCAB = 40


def write_pair(folder: Path) -> Path:
    """A random target in folder/target, and a repeating pattern in folder/d.safetensors."""
    target = tiny_target(vocab_size=VOCAB, num_hidden_layers=7, num_key_value_heads=2)
    target.save_pretrained(folder / "target")
    pattern = torch.randint(VOCAB, (12,))
    starts = torch.randint(12, (40,)).tolist()
    save_tokens(folder / "d.safetensors", [pattern.repeat(4)[s : s + 24] for s in starts])
    return folder


def save_tokens(path: Path, sequences: list[torch.Tensor]) -> None:
    """Sequences of which every token is to be learned."""
    texts = [Text(tokens, torch.ones(len(tokens), dtype=torch.bool)) for tokens in sequences]
    shards.write_shard(path, texts)


def short_run(folder: Path, kind: type[RunConfig] = TrainConfig, **changes) -> RunConfig:
    """Options of six updates on what `write_pair` left in `folder`."""
    options = {
        "target": folder / "target",
        "data": folder / "d.safetensors",
        "draft_vocab_size": 20,
        "steps": 6,
        "precision": "fp32",
        "device": "cpu",
        "batch": 4,
        "length": 24,
        "lr": 1e-3,
        "rank_from": 2,
        "save_every": 3,
        "log_every": 2,
    }
    return parse(kind, **options | changes)


def kill_at(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """A kill after so many updates: nothing of the run is tidied up."""
    inner = Trainer.update

    def update(self: Trainer) -> None:
        if self.step == updates:
            raise KeyboardInterrupt
        inner(self)

    monkeypatch.setattr(Trainer, "update", update)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The drafter in a run's state, float32."""
    state = torch.load(out / "training" / "state.pt", weights_only=True)
    model = state["learners"]["drafter"]["model"]
    return {name.removeprefix("drafter."): value for name, value in model.items()}


def history(out: Path) -> list[dict]:
    """A run's log without times."""
    entries = [json.loads(line) for line in (out / "training/log.jsonl").open()]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
