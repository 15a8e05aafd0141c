"""Tree attention mask and positions."""

from __future__ import annotations

import torch

from vllm_specblock.tree import words_for
from vllm_specblock.triton_kernels.op import op
from vllm_specblock.triton_kernels.verify.build_tree_mask import (
    BatchRows,
    MaskTensors,
    build_tree_mask_triton,
)


class TreeMask:
    """What every row of a batch sees, in tensors that outlive the batch (captured graphs).

    Row t of request r sees cache entries 0 … prefix_len[t] − 1 of its request, and entry
    tree_start[r] + j where bit j of mask_words[t] is set.

    Attributes (T rows, R requests, W words):
        prefix_len: [T] int32.
        mask_words: [T, W] int64.
        tree_start: [R] int32.
        position: [T] int64, the model's positions, which follow a node's depth.
        node_position: [T] int64, the same for roots and nodes alone, one after the other.
        adaptive: the device decides how many rows each request has; the host knows only their sum
            and the maximum per request.
        num_trees: requests with drafts, which come before those without; None: not known.
    """

    def __init__(
        self,
        max_rows: int,
        max_requests: int,
        num_nodes: int,
        device: torch.device,
        adaptive: bool = False,
    ) -> None:
        self.adaptive = adaptive
        self.num_trees: int | None = None
        self.prefix_len = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.mask_words = torch.zeros(
            max_rows, words_for(num_nodes), dtype=torch.int64, device=device
        )
        self.tree_start = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.position = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.node_position = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def fill(self, rows: BatchRows, depth: torch.Tensor, ancestors: torch.Tensor) -> None:
        """Fill the tensors for a batch.

        A root or node sees everything before the root, its ancestors and itself; other rows are
        causal. The last row of a request without drafts is a root.

        Args:
            depth: [S, N+1] int64, 0 for the root, by slot.
            ancestors: [S, N+1, W] int64, as `DraftTree` has them.
        """
        written = self.prefix_len, self.mask_words, self.tree_start, self.position
        build_tree_mask(rows, depth, ancestors, MaskTensors(*written, self.node_position))


@op(build_tree_mask_triton)
def build_tree_mask(
    rows: BatchRows, depth: torch.Tensor, ancestors: torch.Tensor, out: MaskTensors
) -> None:
    """Write the mask and positions of a batch to `out`; `depth` and `ancestors` as in `fill`."""
    num_rows, num_requests = len(rows.position), len(rows.req_idx)
    torch.add(rows.position, 1, out=out.prefix_len[:num_rows])
    out.mask_words[:num_rows] = 0
    out.position[:num_rows] = rows.position

    node = rows.node.long()
    root = rows.position[rows.row] - node
    out.prefix_len[rows.row] = root.int()
    out.mask_words[rows.row] = ancestors[rows.row_req_idx, node]
    by_depth = root + depth[rows.row_req_idx, node]
    out.position[rows.row] = out.node_position[: len(node)] = by_depth
    out.tree_start[:num_requests] = rows.seq_len[:num_requests] - rows.node_start.diff()
