"""Tree attention mask and positions of a batch.

The torch reference is `vllm_specblock.verify.tree_mask.TreeMask`, which also says what it means.
Which rows are nodes follows from tensors of the device alone: where it shares out the drafts, the
host does not know. A program has all rows of a request, so that every row is written once.
"""

from __future__ import annotations

import torch

from ..optional_triton import jit, tl

_ROWS = 512  # that a program looks at together; a prompt has many times as many


def build_tree_mask_triton(
    position: torch.Tensor,
    query_start: torch.Tensor,
    seq_len: torch.Tensor,
    req_idx: torch.Tensor,
    node_start: torch.Tensor,
    depth: torch.Tensor,
    ancestors: torch.Tensor,
    prefix_len: torch.Tensor,
    mask_words: torch.Tensor,
    tree_start: torch.Tensor,
    place: torch.Tensor,
    node_place: torch.Tensor,
) -> None:
    """Launch the kernel.

    Args:
        position, query_start, seq_len, req_idx, node_start: as `BatchRows` has them.
        depth, ancestors: by slot, contiguous.
        prefix_len, mask_words, tree_start, place, node_place: written, from the first row on; the
            last two are `TreeMask`'s positions.
    """
    # One more program, for the rows of nobody.
    _build_tree_mask_kernel[(len(req_idx) + 1,)](
        position,
        len(position),
        query_start,
        seq_len,
        req_idx,
        req_idx.stride(0),
        node_start,
        depth,
        ancestors,
        prefix_len,
        mask_words,
        tree_start,
        place,
        node_place,
        COLUMNS=depth.shape[1],
        W=mask_words.shape[1],
        ROWS=_ROWS,
        num_warps=4,
    )


@jit(do_not_specialize=["num_rows"])
def _build_tree_mask_kernel(
    position,  # [T] int64
    num_rows,  # T
    query_start,  # [R+1] int32
    seq_len,  # [R] int32
    req_idx,  # [R] int64
    req_idx_stride,
    node_start,  # [R+1] int32
    depth,  # [S, COLUMNS] int64
    ancestors,  # [S, COLUMNS, W] int64
    prefix_len,  # [≥ T] int32
    mask_words,  # [≥ T, W] int64
    tree_start,  # [≥ R] int32
    place,  # [≥ T] int64
    node_place,  # [≥ nodes] int64
    COLUMNS: tl.constexpr,  # N + 1
    W: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One request, or, of the last program, what fills up the batch."""
    request = tl.program_id(0)
    real = request < tl.num_programs(0) - 1
    start = tl.load(query_start + request)
    end = tl.load(query_start + request + 1, mask=real, other=num_rows)
    first_node = tl.load(node_start + request)
    num_nodes = tl.load(node_start + request + 1, mask=real, other=first_node) - first_node
    tree = tl.load(req_idx + request * req_idx_stride, mask=real, other=0).to(tl.int64) * COLUMNS
    length = tl.load(seq_len + request, mask=real, other=0)
    tl.store(tree_start + request, length - num_nodes, mask=real)

    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < end
        node = row - (end - num_nodes)
        is_node = inside & (node >= 0)
        entry = tl.load(position + row, mask=inside, other=0)
        below = tl.load(depth + tree + node, mask=is_node, other=0)
        root = entry - node
        tl.store(prefix_len + row, tl.where(is_node, root, entry + 1).to(tl.int32), mask=inside)
        stands = tl.where(is_node, root + below, entry)
        tl.store(place + row, stands, mask=inside)
        tl.store(node_place + first_node + node, stands, mask=is_node)
        at = row.to(tl.int64) * W
        for w in range(W):
            bits = tl.load(ancestors + (tree + node) * W + w, mask=is_node, other=0)
            tl.store(mask_words + at + w, bits, mask=inside)
