"""One launch says of a batch's rows what the torch description of it says."""

from __future__ import annotations

import pytest
import torch
from support.tensors import assert_equal, column, on
from vllm_specblock.triton_kernels.tree.node_bits import climb
from vllm_specblock.triton_kernels.verify.build_tree_mask import MaskTensors

from vllm_specblock.verify.tree_mask import BatchRows, TreeMask


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


def full(num_nodes: int) -> list[tuple[int, int]]:
    """Full trees, cut trees, roots alone, a prompt of several tiles, and one with placeholders."""
    half = num_nodes // 2
    return [(0, num_nodes), (0, 0), (1300, 0), (0, half), (30, half), (0, num_nodes), (511, 0)]


@pytest.mark.parametrize(
    ("counts", "fillers", "num_nodes"),
    [
        *((full(num_nodes), 9, num_nodes) for num_nodes in (1, 63, 64, 256)),
        *(([(0, nodes)], fillers, 12) for fillers in (0, 1, 700) for nodes in (0, 12)),
        ([(4, 0)] * 3, 0, 6),
    ],
    ids=str,
)
def test_as_torch(kernels, counts, fillers, num_nodes):
    """Both write into a TreeMask that is larger, and full of something else."""
    draw = torch.Generator().manual_seed(num_nodes)
    slots = len(counts) + 3
    parent = torch.rand(slots, num_nodes, generator=draw) * torch.arange(1, num_nodes + 1)
    ancestors, depth = climb(parent.int())
    depth = torch.nn.functional.pad(depth.long(), (1, 0))
    rows = ragged(counts, fillers, slots, draw)
    if num_nodes == 6:  # a dummy batch of vLLM's own has position 0 in all rows, at any length
        rows = rows._replace(position=torch.zeros_like(rows.position))
    launch = kernels.load("build_tree_mask").build_tree_mask_triton
    made, wanted = (
        TreeMask(len(rows.position) + 5, len(counts) + 2, num_nodes, device)
        for device in (kernels.device, torch.device("cpu"))
    )
    mine, theirs = (
        MaskTensors(*(getattr(x, name).fill_(-7) for name in MaskTensors._fields))
        for x in (made, wanted)
    )
    wanted.fill(rows, depth, ancestors)
    # The kernel is to do without the indices of every node.
    there = BatchRows(*rows[:5], None, None, None)._replace(req_idx=column(rows.req_idx, 1 << 40))
    launch(*on(kernels.device, (there, depth, ancestors)), mine)
    assert_equal(tuple(mine), tuple(theirs))
