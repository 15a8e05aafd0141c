"""Tree attention mask and positions of a batch.

The reference is `vllm_specblock.verify.tree_mask.build_tree_mask`. The device determines
which rows are nodes, since it may have allocated the drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..optional_triton import jit, tl

_ROWS = 512  # that a program looks at together; a prompt has many times as many


class BatchRows(NamedTuple):
    """T rows of R requests, then the padding rows of a captured graph.

    The last rows of a request are its root and nodes, in tree order: L of all requests.
    """

    position: torch.Tensor  # [T] int64, cache entry of a row in its request
    query_start: torch.Tensor  # [R+1] int32, the rows of each request
    seq_len: torch.Tensor  # [R] int32, entries up to the request's last row, included
    req_idx: torch.Tensor  # [R] int64, the request slot
    node_start: torch.Tensor  # [R+1] int32, the roots and nodes of each request
    row: torch.Tensor  # [L] int64, the row of each root or node
    row_req_idx: torch.Tensor  # [L] int64, its request's slot
    node: torch.Tensor  # [L] int32, its node, 0 for a root


class MaskTensors(NamedTuple):
    """Outputs of a batch, from the first row on; see `TreeMask`."""

    prefix_len: torch.Tensor  # [≥ T] int32
    mask_words: torch.Tensor  # [≥ T, W] int64
    tree_start: torch.Tensor  # [≥ R] int32
    position: torch.Tensor  # [≥ T] int64
    node_position: torch.Tensor  # [≥ nodes] int64


def build_tree_mask_triton(
    rows: BatchRows, depth: torch.Tensor, ancestors: torch.Tensor, out: MaskTensors
) -> None:
    """Launch the kernel; `depth` and `ancestors` by slot, contiguous."""
    # One more program, for the padding rows.
    _build_tree_mask_kernel[(len(rows.req_idx) + 1,)](
        rows,
        len(rows.position),
        rows.req_idx.stride(0),
        depth,
        ancestors,
        out,
        COLUMNS=depth.shape[1],
        W=out.mask_words.shape[1],
    )


@jit(do_not_specialize=["num_rows"])
def _build_tree_mask_kernel(
    rows,  # BatchRows, of which `row` and what follows are not read
    num_rows,  # T
    req_idx_stride,
    depth_ptr,  # [S, COLUMNS] int64
    ancestors_ptr,  # [S, COLUMNS, W] int64
    out,  # MaskTensors
    COLUMNS: tl.constexpr,  # N + 1
    W: tl.constexpr,
    ROWS: tl.constexpr = _ROWS,
):
    """Handle one request, or the padding rows in the last program."""
    request = tl.program_id(0)
    real = request < tl.num_programs(0) - 1
    start = tl.load(rows.query_start + request)
    end = tl.load(rows.query_start + request + 1, mask=real, other=num_rows)
    first_node = tl.load(rows.node_start + request)
    num_nodes = tl.load(rows.node_start + request + 1, mask=real, other=first_node) - first_node
    slot = tl.load(rows.req_idx + request * req_idx_stride, mask=real, other=0)
    tree = slot.to(tl.int64) * COLUMNS
    length = tl.load(rows.seq_len + request, mask=real, other=0)
    tl.store(out.tree_start + request, length - num_nodes, mask=real)

    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < end
        node = row - (end - num_nodes)
        is_node = inside & (node >= 0)
        entry = tl.load(rows.position + row, mask=inside, other=0)
        below = tl.load(depth_ptr + tree + node, mask=is_node, other=0)
        root = entry - node
        tl.store(out.prefix_len + row, tl.where(is_node, root, entry + 1).to(tl.int32), mask=inside)
        stands = tl.where(is_node, root + below, entry)
        tl.store(out.position + row, stands, mask=inside)
        tl.store(out.node_position + first_node + node, stands, mask=is_node)
        at = row.to(tl.int64) * W
        for w in range(W):
            bits = tl.load(ancestors_ptr + (tree + node) * W + w, mask=is_node, other=0)
            tl.store(out.mask_words + at + w, bits, mask=inside)
