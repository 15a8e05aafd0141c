"""Training metrics: running sums and log entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
