"""Training state of a learner, replicated (DDP) or sharded (FSDP2), its log, and its file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vllm_specblock.train.config import RunConfig, TrainError
from vllm_specblock.train.data.shards import check_same, write_text
from vllm_specblock.train.distributed import sum_over_ranks, world
from vllm_specblock.train.learner import Learner, LossOutput, TrainBatch
from vllm_specblock.train.optimizers import make_optimizers


class TrainState:
    """A learner with its optimisers and log, distributed over the ranks."""

    def __init__(self, learner: Learner, config: RunConfig) -> None:
        self.learner = self._whole = learner
        self._module: nn.Module = learner
        many = world()[1] > 1
        if many and config.parallel == "shard":
            # Judging and saving need whole weights on one rank.
            self._whole = copy.deepcopy(learner)
            fully_shard(learner)  # in place, before the optimisers get the parameters
        elif many:
            # The rank head is unused at first, and no row may reach a block.
            self._module = DistributedDataParallel(learner, find_unused_parameters=True)
        self.optimizers = make_optimizers(learner.named_parameters(), config)
        self.metrics_log = MetricsLog()
        self.best_tau = 0.0
        self.lost = 0  # consecutive updates without a finite gradient

    @torch.no_grad()
    def count(self, train_batch: TrainBatch) -> None:
        """Count the rows of one micro-batch."""
        self._forward(train_batch, exchange=False)

    def learn(self, train_batch: TrainBatch, more_to_come: bool) -> None:
        """Accumulate the gradients of one micro-batch."""
        outcome = self._forward(train_batch, exchange=not more_to_come)
        (outcome.loss / train_batch.counts.rounds).backward()
        self.metrics_log.add(outcome)

    def _forward(self, train_batch: TrainBatch, exchange: bool) -> LossOutput:
        """exchange: whether ranks exchange gradients after the next backward pass."""
        if isinstance(self._module, DistributedDataParallel):
            self._module.require_backward_grad_sync = exchange
        elif isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(exchange)
        return self._module(train_batch)

    def step(self, rate: float, clip: float) -> None:
        """Update the weights; skip and count updates without a finite gradient."""
        norm = torch.nn.utils.clip_grad_norm_(self.learner.parameters(), clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = bool(norm.isfinite())
        self.lost = 0 if finite else self.lost + 1
        for optimizer in self.optimizers:
            if finite:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            optimizer.zero_grad()

    def whole(self) -> Learner:
        """Return the learner with whole weights, current on rank 0; every rank must call this."""
        if self._whole is not self.learner:
            self._whole.load_state_dict(_gathered(self.learner.state_dict()))
        return self._whole

    def state(self) -> dict[str, Any]:
        """Return the whole state on the CPU, for any number of ranks; every rank must call this.

        Not torch.distributed.checkpoint: a parameter has no moments before its first update.
        """
        optimizers = []
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            moments = {number: _gathered(of) for number, of in state["state"].items()}
            optimizers.append(state | {"state": moments})
        return {
            "model": _gathered(self.learner.state_dict()),
            "optimizers": optimizers,
            "log": self.metrics_log.state(),
            "best_tau": self.best_tau,
            "lost": self.lost,
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Load a `state` on every rank, for any number of ranks."""
        model = self.learner.state_dict()
        self.learner.load_state_dict(
            {name: _spread_like(model[name], value) for name, value in state["model"].items()}
        )
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            moments = {
                number: {
                    name: _spread_like(parameters[number], value) for name, value in of.items()
                }
                for number, of in saved["state"].items()
            }
            optimizer.load_state_dict(saved | {"state": moments})
        self.metrics_log.load_state(state["log"], device)
        self.best_tau, self.lost = state["best_tau"], state["lost"]


def _gathered(tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in tensors.items()
    }


def _spread_like(example: Tensor, value: Tensor) -> Tensor:
    """Shard `value` like `example`, unless the shapes differ, as for a step count."""
    if not isinstance(example, DTensor) or example.shape != value.shape:
        return value
    return distribute_tensor(value.to(example.device), example.device_mesh, example.placements)


def read_state(path: Path, config: RunConfig, data: str) -> dict[str, Any]:
    """Read what `Trainer.save` wrote to `path`; raises `TrainError` where it is no such state, or
    belongs to other options or data (a fingerprint)."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TrainError(f"{path} is not a training state: {error}.") from None
    if not isinstance(state, dict) or "drafter" not in state.get("learners", ()):
        raise TrainError(f"{path} is not a training state of this version; give another --out.")
    advice = "give the same ones, another --out, or --no-resume to start anew."
    begun = json.loads(state["options"]) | {"data": state["data"]}
    now = config.must_match() | {"data": data}
    check_same(f"{path} was trained", begun, now, advice, hidden={"data"})
    return state


class MetricsLog:
    """Log of one learner. Sums stay on the device until an entry is written.

    Attributes:
        entries: one dict per log line, oldest first.
        sums: since the last entry, of this rank; empty before a batch. [4, M, K] fp32: nats, the
            positions they sum over, hits, and paths; [2] fp32: rank losses, and batches.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.sums: list[Tensor] = []

    def tau_at(self, step: int) -> float | None:
        """τ of the replay after update `step`; None: there was none."""
        return {entry["step"]: entry["tau"] for entry in self.entries if "tau" in entry}.get(step)

    def add(self, outcome: LossOutput) -> None:
        """Count one batch in."""
        num_positions = outcome.seen if outcome.num_positions is None else outcome.num_positions
        grid = torch.stack([outcome.ce_loss, num_positions, outcome.hits, outcome.seen]).float()
        rank = torch.stack([outcome.rank_loss, torch.ones_like(outcome.rank_loss)])
        new = [grid, rank]
        self.sums = [a + b for a, b in zip(self.sums, new)] if self.sums else new

    def entry(self, **more: Any) -> dict[str, Any]:
        """Means over all ranks since the last call, kept in `entries` and returned; every rank
        has to call this.

        Per block and position: `loss`, nats; `alpha`, the share of right paths that were right
        at this position too; `accuracy`, the share of drafts that were right up to and at it.
        """
        grid, rank = (sum_over_ranks(each).cpu() for each in self.sums)
        ce_loss, num_positions, hits, paths = grid
        rank_loss, batches = rank.tolist()
        entry = {
            **more,
            "loss": _rounded(ce_loss / num_positions.clamp(min=1)),
            "alpha": _rounded(hits / paths.clamp(min=1)),
            "accuracy": _rounded(hits / paths[:, :1].clamp(min=1)),
            "rank_loss": round(rank_loss / batches, 6),
        }
        self.sums = []
        self.entries.append(entry)
        return entry

    def state(self) -> dict[str, Any]:
        """With the sums of all ranks; every rank has to call this."""
        sums = [sum_over_ranks(each.clone()) for each in self.sums]
        return {"entries": json.dumps(self.entries), "sums": sums}

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state` returned; its sums count once, on the first rank."""
        self.entries = json.loads(state["entries"])
        share = float(world()[0] == 0)
        self.sums = [each.to(device) * share for each in state["sums"]]

    def write(self, path: Path) -> None:
        """Write all entries, one JSON object a line."""
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in self.entries))


def _rounded(grid: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in grid.tolist()]


def describe(entry: dict[str, Any]) -> str:
    """A log entry as the progress bar shows it: block 1's first loss, and each block's α."""
    alpha = " | ".join(" ".join(f"{100 * a:.0f}" for a in block) for block in entry["alpha"])
    return f"nats {entry['loss'][0][0]:.2f} rank {entry['rank_loss']:.2f} α% {alpha}"
