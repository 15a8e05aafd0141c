"""One launch says of a batch's rows what the torch description of it says."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column, on
from vllm_specblock.triton_kernels.verify.build_tree_mask import MaskTensors

from vllm_specblock.tree import climb
from vllm_specblock.verify.tree_mask import BatchRows, TreeMask

WRITTEN = MaskTensors._fields


def trees_of(slots: int, num_nodes: int, draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths and ancestors by slot."""
    below = torch.rand(slots, num_nodes, generator=draw) * torch.arange(1, num_nodes + 1)
    parent = below.int()
    ancestors, depth = climb(parent)
    return torch.nn.functional.pad(depth.long(), (1, 0)), ancestors


def ragged(counts: list[tuple[int, int]], fillers: int, slots: int, draw) -> BatchRows:
    """Requests of (rows before the root, nodes); at the end rows of no request."""
    before, nodes = torch.tensor(counts).unbind(1)
    scheduled = before + 1 + nodes
    done = torch.randint(0, 5000, (len(counts),), generator=draw)
    start = torch.nn.functional.pad(scheduled.cumsum(0), (1, 0))
    position = torch.cat([at + torch.arange(n) for at, n in zip(done, scheduled.tolist())])
    left_over = torch.randint(0, 5000, (fillers,), generator=draw)
    req_idx = torch.randperm(slots, generator=draw)[: len(counts)]
    node_start = torch.nn.functional.pad((nodes + 1).cumsum(0), (1, 0))
    row = [torch.arange(n + 1) + at for n, at in zip(nodes.tolist(), start[1:] - nodes - 1)]
    return BatchRows(
        position=torch.cat([position, left_over]),
        query_start=start.int(),
        seq_len=(done + scheduled).int(),
        req_idx=req_idx,
        node_start=node_start.int(),
        row=torch.cat(row),
        row_req_idx=req_idx.repeat_interleave(nodes + 1),
        node=torch.cat([torch.arange(n + 1) for n in nodes.tolist()]).int(),
    )


def assert_as_torch(kernels, rows: BatchRows, depth, ancestors) -> None:
    """Both write into a TreeMask that is larger, and full of something else."""
    launch = kernels.load("build_tree_mask").build_tree_mask_triton
    made, wanted = (
        TreeMask(len(rows.position) + 5, len(rows.req_idx) + 2, depth.shape[1] - 1, device)
        for device in (kernels.device, torch.device("cpu"))
    )
    mine, theirs = (
        MaskTensors(*(getattr(x, name).fill_(-7) for name in WRITTEN)) for x in (made, wanted)
    )
    wanted.fill(rows, depth, ancestors)
    # The kernel is to do without the indices of every node.
    there = BatchRows(*rows[:5], None, None, None)._replace(req_idx=column(rows.req_idx, 1 << 40))
    launch(*on(kernels.device, (there, depth, ancestors)), mine)
    assert_equal(tuple(mine), tuple(theirs))


def assert_ragged_as_torch(kernels, counts, fillers: int, num_nodes: int) -> None:
    draw = torch.Generator().manual_seed(num_nodes)
    slots = len(counts) + 3
    trees = trees_of(slots, num_nodes, draw)
    assert_as_torch(kernels, ragged(counts, fillers, slots, draw), *trees)


@pytest.mark.parametrize("num_nodes", [1, 63, 64, 256])
def test_decodes_chunks_and_fillers(kernels, num_nodes):
    """Full trees, cut trees, roots alone, a prompt of several tiles, and one with placeholders."""
    half = num_nodes // 2
    counts = [(0, num_nodes), (0, 0), (1300, 0), (0, half), (30, half), (0, num_nodes), (511, 0)]
    assert_ragged_as_torch(kernels, counts, 9, num_nodes)


@pytest.mark.parametrize("fillers", [0, 1, 700])
@pytest.mark.parametrize("nodes", [0, 12])
def test_one_request(kernels, fillers, nodes):
    assert_ragged_as_torch(kernels, [(0, nodes)], fillers, 12)


def test_a_batch_of_vllms_own(kernels):
    """Dummy batches have position 0 in all rows, at any length."""
    draw = torch.Generator().manual_seed(0)
    rows = ragged([(4, 0)] * 3, 0, 4, draw)
    rows = rows._replace(position=torch.zeros_like(rows.position))
    assert_as_torch(kernels, rows, *trees_of(4, 6, draw))
