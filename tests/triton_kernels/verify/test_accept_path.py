"""One launch walks as torch does, through trees of all sizes, and writes into the right slots."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column, on
from vllm_specblock.triton_kernels.tree.store_tree import KeptTrees

from vllm_specblock.verify.accept_path import DrawnRows, accept_path_rows

from ..random_trees import random_trees


class Case:
    """A batch over few tokens: long matches, many twins. Trees are random in every slot.

    vocab: 1 lets everything match, and the sign bits of the words with it.
    """

    def __init__(self, count: int, num_nodes: int, vocab: int, max_depth: int, seed: int = 0):
        self.draw = torch.Generator().manual_seed(seed)
        slots = count + 4
        tree = random_trees(slots, num_nodes, close=4, seed=100 + seed)
        depth, none = torch.nn.functional.pad(tree.depth.long(), (1, 0)), None
        path = torch.full((slots, max_depth + 1), -7)
        trees = tree.parent, depth, none, tree.ancestors, none, path[:, 0].int(), path
        self.trees = KeptTrees(*trees)

        scheduled = self.among(0, num_nodes, count)
        scheduled[0] = num_nodes
        if count > 2:
            scheduled[1] = 0
        first_row = torch.nn.functional.pad((scheduled + 1).cumsum(0), (1, 0)).int()
        rows = int(first_row[-1])
        token = self.among(0, vocab - 1, rows).int()
        token[self.among(0, 9, rows) == 0] = -1
        req_idx = torch.randperm(slots, generator=self.draw)[:count]
        req_idx[req_idx == 0], req_idx[0] = req_idx[0].clone(), 0
        self.rows = DrawnRows(token, self.among(0, vocab - 1, rows), first_row, req_idx)

    def among(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self.draw)

    def run(self, function, device) -> list[torch.Tensor]:
        """Output, numbers of tokens, and all slots' verdicts afterwards; on the CPU."""
        trees = on(device, self.trees)
        # A part of a batch begins anywhere.
        parts = [torch.nn.functional.pad(x.to(device), (1, 0))[1:] for x in self.rows[:3]]
        rows = DrawnRows(*parts, column(self.rows.req_idx.to(device), 1 << 40))
        output, num_sampled = function(rows, trees)
        return [x.cpu() for x in (output, num_sampled, trees.path, trees.accepted)]


@pytest.mark.parametrize(
    ("count", "num_nodes", "max_depth"),
    [(1, 12, 8), (5, 1, 1), (9, 7, 3), (3, 63, 63), (3, 64, 9), (3, 256, 90)],
)
@pytest.mark.parametrize("vocab", [1, 2, 4])
def test_as_torch(kernels, count, num_nodes, max_depth, vocab):
    launch = kernels.load("accept_path").accept_path_triton
    lengths = set()
    for seed in range(3):
        case = Case(count, num_nodes, vocab, max_depth, seed)
        wanted = case.run(accept_path_rows, "cpu")
        assert_equal(case.run(launch, kernels.device), wanted)
        lengths |= set(wanted[1].tolist())
    assert len(lengths) > (num_nodes > 1), "nothing was ever accepted, or everything always"
