"""Rank-guided tree growth (SpecBlock paper, §3.2), and by levels EAGLE-2's (arXiv 2406.16858).

Shapes are fixed, and no value is read on the host: M blocks of candidates lie side by side, most of
them unwanted; one pass at the end joins equal ones and keeps the best N.
"""

from __future__ import annotations

import torch

from vllm_specblock.candidates import NEVER, select
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.drafting.expand import Growing, NextStarts, TreeShape
from vllm_specblock.triton_kernels.drafting.expand_numba import CompiledGrowing
from vllm_specblock.triton_kernels.optional_numba import takes
from vllm_specblock.triton_kernels.tree.candidate_keys import (
    CLOSED,
    DEPTH_ONE,
    FIRST,
    MAX_DEPTH,
    ROOT_HASH,
    extend_hash,
    join,
    keep,
    rank_key,
)
from vllm_specblock.triton_kernels.tree.select_tree import MOST_CANDIDATES, Candidates

_DEPTH = MAX_DEPTH * DEPTH_ONE


class Expansion:
    """Candidates of one step; `attach` per block.

    Candidate 0 is the root. Row r, position k, rank b is candidate 1 + (r·K + k)·B + b.

    Args:
        width: [4] int64, `shape.branching` on the device.
    """

    def __init__(self, shape: TreeShape, width: torch.Tensor, num_requests: int) -> None:
        self.shape = shape
        K, B, device = shape.block_size, shape.width, width.device
        count = shape.candidates
        self.fields = torch.empty(4, num_requests, count, dtype=torch.int64, device=device)
        self.token, self.path_hash, self.key, self.parent = self.fields.unbind()
        self.score = torch.empty(num_requests, count, dtype=torch.float32, device=device)
        self.fields[..., 0].zero_()
        self.path_hash[:, 0].fill_(ROOT_HASH)
        self.score[:, 0].zero_()

        self.index = torch.arange(1, count, device=device).view(-1, K, B)
        depth = torch.arange(1, K + 1, device=device) * DEPTH_ONE
        self.tie = self.index + depth[:, None]  # [rows, K, B], of a row below the root
        wanted = torch.arange(B, device=device) < width.clamp(min=1)[:, None]
        self.unwanted = torch.where(wanted, 0.0, NEVER)  # [4, B] by bucket
        self.closed = torch.where(width > 0, 0, CLOSED)  # [4] by bucket
        self.block = 0
        self.open: list[torch.Tensor] = []  # per block [R, rows·K·B], keys as starts
        self.started: list[torch.Tensor] = []  # per block [R, S], hashes of the starts' texts

    def attach(
        self,
        starts: NextStarts | None,  # of the last call; None: block 1, of one row under the root
        logprob: torch.Tensor,  # [R, rows, K, B] fp32, best first, over the draft vocabulary
        token: torch.Tensor,  # [R, rows, K, B] int64, target vocabulary
        bucket: torch.Tensor | None = None,  # [R, rows, K] int64, 0 … 3; None: all have B children
    ) -> NextStarts | DraftTree:
        """Hang a block under its starts; return the next starts, or at last the trees.

        Position k of a row hangs its tokens under the best one of position k − 1.
        """
        self.block += 1
        if starts is None:
            _, path_hash, key, node = self.fields[..., :1].unbind()
            score = self.score[:, :1]
        else:
            node = starts.node
            path_hash, key = self.fields[1:3].gather(2, node.expand(2, -1, -1)).unbind()
            score = torch.where(starts.valid, self.score.gather(1, node), NEVER)
            # The root is no start.
            self.started.append(torch.where(starts.valid, path_hash, ROOT_HASH))
        R, rows, K, B = token.shape
        here, cells = (
            slice(count(self.block - 1), count(self.block))
            for count in (self.shape.rows, self.shape.count)
        )
        tokens, hashes, keys, parents = self.fields[..., cells].view(4, R, rows, K, B).unbind()
        scores = self.score[:, cells].view(R, rows, K, B)
        # Rounding may leave a certain token's log-probability above 0; a child's score must
        # not pass its parent's.
        unwanted = 0.0 if bucket is None else self.unwanted[bucket]
        gain = (logprob.detach() + unwanted).clamp_(max=0)
        tokens.copy_(token)
        score, path_hash = score[..., None], path_hash[..., None]
        for k in range(K):
            torch.add(score, gain[:, :, k], out=scores[:, :, k])
            extend_hash(path_hash, tokens[:, :, k], out=hashes[:, :, k])
            score, path_hash = scores[:, :, k, :1], hashes[:, :, k, :1]
        parents[:, :, 0] = node[..., None]
        parents[:, :, 1:] = self.index[here, :-1, :1]
        tie = self.tie[here] + (key & _DEPTH)[..., None, None]
        rank_key(scores, tie, out=keys)

        if self.block == self.shape.num_blocks:
            return self.select()
        may_start = keys.clone() if bucket is None else keys | self.closed[bucket[..., None]]
        if self.shape.by_level:
            return self._starts(may_start.flatten(1), cells.start)
        # The main chain goes on from row 0 of every block, which starts at its last end.
        may_start[:, 0, -1, :1].bitwise_or_(FIRST)
        self.open.append(may_start.flatten(1))
        return self._starts(torch.cat(self.open, 1))

    def _starts(self, key: torch.Tensor, first: int = 1) -> NextStarts:
        """Choose the S best nodes for the next block; the chain's end is the first.

        Candidates of equal text are one node, the best of them. A node starts one block only; its
        duplicates in other blocks are excluded.

        Args:
            key: [R, n] int64, keys as starts of the candidates from number `first` on.
        """
        K, B, S = self.shape.block_size, self.shape.width, self.shape.num_starts
        if self.started and not self.shape.by_level:
            count = self.shape.count(self.block)
            order, winner = join(self.key[:, :count], self.path_hash[:, :count])
            place = torch.arange(order.shape[1], device=order.device)
            best = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, winner == place)
            path_hash = self.path_hash[:, 1 : order.shape[1], None]
            again = (path_hash == torch.cat(self.started, 1)[:, None]).any(-1)
            key = torch.where(best[:, 1:] & ~again, key, CLOSED)
        count = key.shape[1]
        if count < S:
            key = torch.nn.functional.pad(key, (0, S - count), value=CLOSED)
        key, index = key.topk(S, dim=1, largest=False)
        if count < S:
            index = index.clamp(max=count - 1)
        node = index + first
        drafted = (node - 1) // B
        return NextStarts(
            node, self.token.gather(1, node), drafted // K, drafted % K, valid=key < CLOSED
        )

    def select(self) -> DraftTree:
        """Join nodes of equal text, keep the best N, put them in order."""
        token, path_hash, key, parent = self.fields
        shape, texts = self.shape, None if self.shape.by_level else path_hash
        given = Candidates(token, parent, self.score, key, texts)
        return select(given, shape.budget, shape.max_depth)[0]

    def blocks(self) -> torch.Tensor:
        """Return the block, 1 … M, of each node of the trees: [R, N] int64, 0 if unused."""
        shape = self.shape
        candidate, _ = keep(self.key, self.path_hash, shape.budget)
        row = (candidate - 1) // (shape.block_size * shape.width)
        block = 1 + (row + shape.num_starts - 1) // shape.num_starts
        return torch.where(candidate > 0, block, 0)


def expansion(shape: TreeShape, width: torch.Tensor, num_requests: int) -> Expansion | Growing:
    """Make an expansion for the device of `width`: one launch per block unless C is too large."""
    kind: type[Expansion | Growing] = Expansion
    if takes(width):
        kind = CompiledGrowing
    elif width.is_cuda and shape.candidates <= MOST_CANDIDATES:
        kind = Growing
    return kind(shape, width, num_requests)
