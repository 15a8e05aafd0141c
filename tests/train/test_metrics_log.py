"""What a run logs, against sums done by hand."""

from __future__ import annotations

import torch

from vllm_specblock.train.learner import LossOutput
from vllm_specblock.train.train_state import MetricsLog, describe


def outcome(ce_loss, hits, seen, rank) -> LossOutput:
    grids = [torch.tensor(grid, dtype=torch.float32) for grid in (ce_loss, hits, seen)]
    return LossOutput(torch.tensor(0.0), *grids, torch.tensor(rank))


def test_means_are_over_positions_since_the_last_entry():
    first = outcome([[8.0, 6.0], [2.0, 0.0]], [[4, 1], [1, 0]], [[8, 4], [2, 1]], 1.0)
    second = outcome([[4.0, 0.0], [0.0, 0.0]], [[2, 2], [0, 0]], [[4, 2], [0, 0]], 2.0)
    metrics_log = MetricsLog()
    metrics_log.add(first)
    metrics_log.add(second)
    entry = metrics_log.entry(step=7)
    assert entry["step"] == 7
    assert entry["loss"] == [[1.0, 1.0], [1.0, 0.0]]  # 12 / 12, 6 / 6, 2 / 2, nothing
    assert entry["alpha"] == [[0.5, 0.5], [0.5, 0.0]]  # 6 / 12, 3 / 6, 1 / 2, 0 / 1
    assert entry["accuracy"] == [[0.5, 0.25], [0.5, 0.0]]  # of 12 paths, of 2 paths
    assert entry["rank_loss"] == 1.5
    assert describe(entry) == "nats 1.00 rank 1.50 α% 50 50 | 50 0"
    metrics_log.add(second)
    assert metrics_log.entry(step=8)["alpha"] == [[0.5, 1.0], [0.0, 0.0]]
    assert [entry["step"] for entry in metrics_log.entries] == [7, 8]
