"""Tree attention mask and positions."""

from __future__ import annotations

import numpy as np
import torch

from vllm_specblock.triton_kernels.op import op, views
from vllm_specblock.triton_kernels.tree.node_bits import words_for
from vllm_specblock.triton_kernels.verify.build_tree_mask import (
    BatchRows,
    MaskTensors,
    build_tree_mask_triton,
)


class TreeMask:
    """What every row of a batch sees, in tensors that outlive the batch (captured graphs).

    Row t of request r sees cache entries 0 … prefix_len[t] − 1 of its request, and entry
    tree_start[r] + j where bit j of mask_words[t] is set.

    adaptive: the device decides how many rows each request has; the host knows only their sum and
        the maximum per request.
    """

    def __init__(
        self,
        max_rows: int,
        max_requests: int,
        num_nodes: int,
        device: torch.device,
        adaptive: bool = False,
    ) -> None:
        self.num_nodes, self.adaptive = num_nodes, adaptive
        # Requests with drafts, which come before those without; None: not known.
        self.num_trees: int | None = None

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.prefix_len = zeros(max_rows, dtype=torch.int32)
        self.mask_words = zeros(max_rows, words_for(num_nodes))
        self.tree_start = zeros(max_requests, dtype=torch.int32)
        self.position = zeros(max_rows)  # the model's, which follow a node's depth
        # The same for roots and nodes alone, one after the other.
        self.node_position = zeros(max_rows)

    def fill(self, rows: BatchRows, depth: torch.Tensor, ancestors: torch.Tensor) -> None:
        """Fill the tensors for a batch.

        A root or node sees everything before the root, its ancestors and itself; other rows are
        causal. The last row of a request without drafts is a root. By slot, depth is [S, N+1]
        int64, 0 for the root, and ancestors [S, N+1, W] int64, as `DraftTree` has them.
        """
        out = MaskTensors._make(getattr(self, name) for name in MaskTensors._fields)
        build_tree_mask(rows, depth, ancestors, out)


@op(build_tree_mask_triton)
def build_tree_mask(
    rows: BatchRows, depth: torch.Tensor, ancestors: torch.Tensor, out: MaskTensors
) -> None:
    """Write the mask and positions of a batch to `out`; `depth` and `ancestors` as in `fill`."""
    rows, to, (depths, above) = views(rows), views(out), views([depth, ancestors])
    num_rows, num_requests = len(rows.position), len(rows.req_idx)
    to.prefix_len[:num_rows] = rows.position + 1
    to.mask_words[:num_rows] = 0
    to.position[:num_rows] = rows.position

    root, of = rows.position[rows.row] - rows.node, (rows.row_req_idx, rows.node)
    to.prefix_len[rows.row] = root
    to.mask_words[rows.row] = above[of]
    by_depth = root + depths[of]
    to.position[rows.row] = to.node_position[: len(root)] = by_depth
    to.tree_start[:num_requests] = rows.seq_len[:num_requests] - np.diff(rows.node_start)
