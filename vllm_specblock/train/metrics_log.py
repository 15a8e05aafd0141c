"""Training metrics: running sums, log entries, trackers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.shards import write_text
from vllm_specblock.train.distributed import sum_over_ranks, world
from vllm_specblock.train.learner import LossOutput


class MetricsLog:
    """Log of one learner. Sums stay on the device until an entry is written.

    Attributes:
        entries: one dict per log line, oldest first.
        grid: [4, M, K] fp32: nats, the positions they sum over, hits, and paths; None: no batch.
        rank: [2] fp32: rank losses, and batches.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.grid: Tensor | None = None
        self.rank: Tensor | None = None

    def tau_at(self, step: int) -> float | None:
        """τ of the replay after update `step`; None: there was none."""
        found = [entry["tau"] for entry in self.entries if "tau" in entry and entry["step"] == step]
        return found[-1] if found else None

    def add(self, outcome: LossOutput) -> None:
        """Count one batch in."""
        num_positions = outcome.seen if outcome.num_positions is None else outcome.num_positions
        grid = torch.stack([outcome.ce_loss, num_positions, outcome.hits, outcome.seen]).float()
        rank = torch.stack([outcome.rank_loss, torch.ones_like(outcome.rank_loss)])
        self.grid = grid if self.grid is None else self.grid + grid
        self.rank = rank if self.rank is None else self.rank + rank

    def entry(self, **more: Any) -> dict[str, Any]:
        """Means over all ranks since the last call, kept in `entries` and returned; every rank
        has to call this.

        Per block and position: `loss`, nats; `alpha`, the share of right paths that were right
        at this position too; `accuracy`, the share of drafts that were right up to and at it.
        """
        assert self.grid is not None and self.rank is not None  # a batch was counted
        ce_loss, num_positions, hits, paths = sum_over_ranks(self.grid).cpu()
        rank, batches = sum_over_ranks(self.rank).tolist()
        entry = {
            **more,
            "loss": _rounded(ce_loss / num_positions.clamp(min=1)),
            "alpha": _rounded(hits / paths.clamp(min=1)),
            "accuracy": _rounded(hits / paths[:, :1].clamp(min=1)),
            "rank_loss": round(rank / batches, 6),
        }
        self.grid = self.rank = None
        self.entries.append(entry)
        return entry

    def state(self) -> dict[str, Any]:
        """With the sums of all ranks; every rank has to call this."""
        sums = {
            name: None if value is None else sum_over_ranks(value.clone())
            for name, value in (("grid", self.grid), ("rank", self.rank))
        }
        return {"entries": json.dumps(self.entries), **sums}

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state` returned; its sums count once, on the first rank."""
        self.entries = json.loads(state["entries"])
        if state["grid"] is None:
            self.grid = self.rank = None
            return
        mine = 1.0 if world()[0] == 0 else 0.0
        self.grid, self.rank = (state[name].to(device) * mine for name in ("grid", "rank"))

    def write(self, path: Path) -> None:
        """Write all entries, one JSON object a line."""
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in self.entries))


def _rounded(grid: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in grid.tolist()]


def describe(entry: dict[str, Any]) -> str:
    """A log entry as the progress bar shows it: block 1's first loss, and each block's α."""
    alpha = " | ".join(" ".join(f"{100 * a:.0f}" for a in block) for block in entry["alpha"])
    return f"nats {entry['loss'][0][0]:.2f} rank {entry['rank_loss']:.2f} α% {alpha}"


class Tracker:
    """Log numbers to tensorboard or wandb ("none": to neither), on the first rank.

    Raises:
        TrainError: the package is not installed.
    """

    def __init__(self, kind: str, folder: Path, options: dict[str, Any]) -> None:
        self.kind = kind
        self._writer: Any = None
        if kind == "none" or world()[0] != 0:
            return
        try:
            if kind == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(folder / "tensorboard"))
            else:
                import wandb

                self._writer = wandb.init(dir=str(folder), config=options, resume="allow")
        except ImportError:
            raise TrainError(
                f"--track {kind} needs the package {kind}, which is not installed: "
                f"pip install {kind}."
            ) from None

    def log(self, name: str, entry: dict[str, Any]) -> None:
        """Log the numbers of one entry of the learner `name`."""
        if self._writer is None:
            return
        numbers = dict(_numbers(name, entry))
        if self.kind == "wandb":
            self._writer.log(numbers, step=entry["step"])
            return
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, entry["step"])
        self._writer.flush()


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Numbers in nested lists and dicts, by a path such as "drafter/alpha/0/2"."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _numbers(f"{name}/{key}", part)
