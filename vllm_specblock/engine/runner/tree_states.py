"""Tree states of every request slot; vLLM itself carries only the tokens of draft trees."""

from __future__ import annotations

import torch

from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.op import op, views
from vllm_specblock.triton_kernels.tree.node_bits import climb, words_for
from vllm_specblock.triton_kernels.tree.store_tree import KeptTrees, store_trees_triton


class TreeStates:
    """Topology and verdict of every request slot of the engine, fields as in `DraftTree`.

    S slots, N nodes, W ancestor words, D the deepest path. CUDA graphs capture the addresses.
    """

    def __init__(
        self, num_slots: int, num_nodes: int, max_depth: int, device: torch.device
    ) -> None:
        self.num_nodes, self.max_depth = num_nodes, max_depth
        chain = torch.arange(num_nodes, dtype=torch.int32, device=device)
        self._chain = chain, torch.arange(num_nodes + 1, device=device), climb(chain[None])[0]

        def per_slot(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self.parent = per_slot(num_nodes, dtype=torch.int32)  # [S, N]
        self.depth = per_slot(num_nodes + 1)  # [S, N+1]; column 0 is the root, 0
        self.ancestors = per_slot(num_nodes + 1, words_for(num_nodes))  # [S, N+1, W]
        # [S, D+1], node at each position of the accepted path; column 0 is the root.
        self.path = per_slot(max_depth + 1)
        self.accepted = per_slot(dtype=torch.int32)  # [S], draft nodes on that path
        self.origin = per_slot(num_nodes, dtype=torch.uint8)  # [S, N]; 0: no draft of ours
        # [S, N], cumulative draft log-scores of the nodes; −inf: no draft of ours.
        self.score = per_slot(num_nodes, dtype=torch.float32)
        self.reset(slice(None))

    @property
    def trees(self) -> KeptTrees:
        """All of these tensors, for kernels."""
        return KeptTrees._make(getattr(self, name) for name in KeptTrees._fields)

    def reset(self, req_idx: int | slice) -> None:
        """Reset a slot to a chain, for placeholders of the scheduler and dummy batches."""
        self.parent[req_idx], self.depth[req_idx], self.ancestors[req_idx] = self._chain
        self.accepted[req_idx].fill_(0)
        self.origin[req_idx] = 0
        self.score[req_idx] = float("-inf")


@op(store_trees_triton)
def store_trees(
    req_idx: torch.Tensor,
    tree: DraftTree,
    kept: KeptTrees,
    chain: torch.Tensor | None,
    paused: torch.Tensor | None,
    tokens: torch.Tensor | None,
) -> torch.Tensor:
    """Store the trees that will be verified, with no node accepted; return their tokens.

    Args:
        req_idx: [R] integers.
        chain: [R] bool or integers, requests of which only the best path is verified.
        paused: [S] bool, slots whose trees become empty.
        tokens: [R, N] int64, destination of the tokens; None: a new tensor.
    """
    if chain is not None:
        tree = tree.chains_where(chain)
    if paused is not None and (empty := paused[req_idx]).any():  # a host tensor
        requests, nodes = tree.token.shape
        tree = tree.where(empty, DraftTree.empty(requests, nodes, tree.token.device))
    new = tree.parent, tree.depth, tree.logprob, tree.ancestors, tree.origins()
    to, (slots, parent, depth, score, ancestors, origin) = views(kept), views([req_idx, *new])
    to.parent[slots], to.depth[slots, 1:], to.score[slots] = parent, depth, score
    to.ancestors[slots], to.origin[slots], to.accepted[slots] = ancestors, origin, 0
    return tree.token if tokens is None else tokens.copy_(tree.token)
