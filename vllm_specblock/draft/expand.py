"""Rank-guided expansion: from the drafter's distributions to a tree (SpecBlock paper, §3.2).

Everything has a shape that the configuration fixes, and no value is read on the host: M blocks
of candidates are laid side by side, most of them marked as not wanted, and one pass at the end
joins equal ones, keeps the best N and puts them in order.

Candidates are ranked by one int64 key, smallest first: bits 32–62 hold −score (a float that is
not negative orders as its bits do; not wanted is +inf), bits 24–31 the depth, bits 0–23 the
candidate's index. Ties thus go to the shallower, then to the earlier candidate, and the sorted
key says by itself which candidate it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specblock.tree import DraftTree

_NEVER = float("-inf")
_INDEX = (1 << 24) - 1
_DEPTH = 0xFF << 24
_CLOSED = 0x7F800000 << 32
"""Key of a score of −inf: what is not below it is not a node."""
_FIRST = -(1 << 63)
"""Put in a key, this bit sorts it before all others."""
_PATH_FACTOR = -7046029254386353131


@dataclass(frozen=True)
class Shape:
    """What fixes the shapes of an expansion.

    Attributes:
        block_size: K, positions per block.
        num_blocks: M.
        num_starts: S, rows of every block after the first.
        branching: children per rank bucket; 0 gives up at such a position: only the chain's
            own node is attached, and no block starts there.
        budget: N, nodes of the tree.

    Raises:
        ValueError: paths of more than 255 tokens.
    """

    block_size: int
    num_blocks: int
    num_starts: int
    branching: tuple[int, int, int, int]
    budget: int

    def __post_init__(self):
        if self.max_depth > 255:
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_size} positions draft paths of "
                f"{self.max_depth} tokens, but at most 255 are supported."
            )

    @property
    def width(self) -> int:
        """B, candidates that are looked at per position."""
        return max(1, *self.branching)

    @property
    def max_depth(self) -> int:
        """M · K, tokens on the longest path."""
        return self.num_blocks * self.block_size

    @property
    def num_rows(self) -> int:
        """Drafted rows: the drafting row, and S per further block."""
        return 1 + (self.num_blocks - 1) * self.num_starts


@dataclass(frozen=True)
class Starts:
    """Nodes from which the next block grows, S per request.

    Attributes (each [R, S]):
        node: int64, candidate index.
        token: int64.
        row: int64, the drafted row that the node came from: 0 is the drafting row, the s-th
            start of block m is row 1 + (m − 2)·S + s.
        position: int64, 0-based position in that row.
        valid: bool; the others are there for the shape's sake.
    """

    node: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    valid: torch.Tensor


class Expansion:
    """Candidates of one step; `first_block`, then `starts` and `next_block` per block, `finish`.

    Candidate 0 is the root. Row r, position k, rank b is candidate 1 + (r·K + k)·B + b.

    Args:
        width: [4] int64, `shape.branching` on the device, made once by the caller.
    """

    def __init__(self, shape: Shape, width: torch.Tensor, num_requests: int):
        self.shape = shape
        K, B, device = shape.block_size, shape.width, width.device
        count = 1 + shape.num_rows * K * B
        self.fields = torch.empty(4, num_requests, count, dtype=torch.int64, device=device)
        self.token, self.path_hash, self.key, self.parent = self.fields.unbind()
        self.score = torch.empty(num_requests, count, dtype=torch.float32, device=device)
        self.fields[..., 0].zero_()
        self.path_hash[:, 0].fill_(1)  # not 0: a leading token 0 has to count
        self.score[:, 0].zero_()

        self.index = torch.arange(1, count, device=device).view(-1, K, B)
        depth = torch.arange(1 << 24, (K + 1) << 24, 1 << 24, device=device)
        self.tie = self.index + depth[:, None]  # [rows, K, B], of a row below the root
        wanted = torch.arange(B, device=device) < width.clamp(min=1)[:, None]
        self.unwanted = torch.where(wanted, 0.0, _NEVER)  # [4, B] by bucket
        self.closed = torch.where(width > 0, 0, _CLOSED)  # [4] by bucket
        self.rows = 0
        self.open: list[torch.Tensor] = []  # per block [R, rows·K·B], keys as starts
        self.started: list[torch.Tensor] = []  # per block [R, S], hashes of the starts' texts

    def first_block(
        self, top_logprob: torch.Tensor, top_token: torch.Tensor, bucket: torch.Tensor
    ) -> None:
        """Hang block 1 under the root.

        Args:
            top_logprob: [R, K, B] fp32, best first, normalised over the draft vocabulary.
            top_token: [R, K, B] int64, target vocabulary.
            bucket: [R, K] int64, rank bucket 0 … 3 of each position.
        """
        _, path_hash, key, node = self.fields[..., :1].unbind()
        self._attach(
            node,
            self.score[:, :1],
            path_hash,
            key,
            top_logprob[:, None],
            top_token[:, None],
            bucket[:, None],
        )

    def starts(self, block: int) -> Starts:
        """Choose the S best nodes so far for block `block` ≥ 2; the chain's end is the first.

        Candidates of equal text are one node, the best of them, and a node starts a block at
        most once: without that, a later block would mostly start again from the twins of
        nodes that have been started from.
        """
        K, B, S = self.shape.block_size, self.shape.width, self.shape.num_starts
        key = torch.cat(self.open, 1)
        if block > 2:
            order, winner = self._join()
            place = torch.arange(order.shape[1], device=order.device)
            best = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, winner == place)
            path_hash = self.path_hash[:, 1 : order.shape[1], None]
            again = (path_hash == torch.cat(self.started, 1)[:, None]).any(-1)
            key = torch.where(best[:, 1:] & ~again, key, _CLOSED)
        count = key.shape[1]
        if count < S:
            key = torch.nn.functional.pad(key, (0, S - count), value=_CLOSED)
        key, index = key.topk(S, dim=1, largest=False)
        if count < S:
            index = index.clamp(max=count - 1)
        node, drafted = index + 1, index // B
        return Starts(
            node, self.token.gather(1, node), drafted // K, drafted % K, valid=key < _CLOSED
        )

    def next_block(
        self,
        starts: Starts,
        block: int,
        top_logprob: torch.Tensor,
        top_token: torch.Tensor,
        bucket: torch.Tensor,
    ) -> None:
        """Hang block `block` under its starts; as `first_block`, with [R, S] before [K, B]."""
        node = starts.node
        path_hash, key = self.fields[1:3].gather(2, node.expand(2, -1, -1)).unbind()
        score = torch.where(starts.valid, self.score.gather(1, node), _NEVER)
        if block < self.shape.num_blocks:
            # 1 is the root's hash, and the root is no start.
            self.started.append(torch.where(starts.valid, path_hash, 1))
        self._attach(node, score, path_hash, key, top_logprob, top_token, bucket)

    def _attach(self, node, score, path_hash, key, top_logprob, top_token, bucket) -> None:
        """Add one caterpillar per row: a chain of top-1 tokens, each with its siblings.

        Position k hangs its tokens under the chain's node of position k − 1.

        Args:
            node, score, path_hash, key: [R, rows], of the candidates to start from.
            top_logprob, top_token: [R, rows, K, B]; bucket: [R, rows, K].
        """
        R, rows, K, B = top_token.shape
        here = slice(self.rows, self.rows + rows)
        cells = slice(1 + self.rows * K * B, 1 + (self.rows + rows) * K * B)
        tokens, hashes, keys, parents = self.fields[..., cells].view(4, R, rows, K, B).unbind()
        scores = self.score[:, cells].view(R, rows, K, B)
        # Rounding may leave a certain token's log-probability above 0; a child's score must
        # not pass its parent's.
        gain = (top_logprob.detach() + self.unwanted[bucket]).clamp_(max=0)
        tokens.copy_(top_token)
        score, path_hash = score[..., None], path_hash[..., None]
        for k in range(K):
            torch.add(score, gain[:, :, k], out=scores[:, :, k])
            # The hash of a text one token longer, in wrapping int64. Two texts of one hash
            # would be taken for one: a draft in the wrong place, never a wrong output, since
            # the target judges the tree as it stands.
            torch.add(tokens[:, :, k], path_hash, alpha=_PATH_FACTOR, out=hashes[:, :, k])
            score, path_hash = scores[:, :, k, :1], hashes[:, :, k, :1]
        parents[:, :, 0] = node[..., None]
        parents[:, :, 1:] = self.index[here, :-1, :1]
        tie = self.tie[here] + (key & _DEPTH)[..., None, None]
        torch.add(tie, scores.abs().view(torch.int32), alpha=1 << 32, out=keys)
        self.rows += rows

        if self.rows < self.shape.num_rows:
            may_start = keys | self.closed[bucket][..., None]
            # The main chain goes on from row 0 of every block, which starts at its last end.
            may_start[:, 0, -1, :1].bitwise_or_(_FIRST)
            self.open.append(may_start.flatten(1))

    def _join(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank all candidates so far, and find which are of equal text.

        Returns:
            order: [R, C] int64, candidates from best to worst; the root is the first.
            winner: [R, C] int64, by rank: the best rank of the same text.
        """
        count = 1 + self.index[: self.rows].numel()
        order = self.key[:, :count].sort(dim=1).values & _INDEX
        # Nodes of equal text are neighbours once sorted by hash; the first of them is the best.
        by_hash, rank = self.path_hash[:, :count].gather(1, order).sort(dim=1, stable=True)
        leads = torch.nn.functional.pad(by_hash[:, 1:] != by_hash[:, :-1], (1, 0), value=True)
        place = torch.arange(count, device=order.device)
        leader = (place * leads).cummax(dim=1).values
        return order, torch.empty_like(order).scatter_(1, rank, rank.gather(1, leader))

    def finish(self) -> DraftTree:
        """Join nodes of equal text, keep the best N, put them in order."""
        N = self.shape.budget
        order, winner = self._join()
        count = order.shape[1]
        place = torch.arange(count, device=order.device)
        kept = (winner == place) & (self.key.gather(1, order) < _CLOSED)
        node = kept.cumsum(1) - 1  # 0 is the root
        # A loser's children hang from the winner, whose score is no lower.
        node_of = torch.empty_like(order).scatter_(1, order, node.gather(1, winner))

        # What is not kept or over the budget goes to a last column, which is cut off. (On a
        # CPU `searchsorted` would do it too, but starts threads for as few as 200 values.)
        column = torch.where(kept, node, N + 1).clamp_(max=N + 1)
        candidate = order.new_zeros(len(order), N + 2).scatter_(1, column, order)[:, 1:-1]
        parent = node_of.gather(1, self.parent.gather(1, candidate))
        total = node[:, -1:]
        used = torch.arange(N, device=order.device) < total
        return DraftTree.from_nodes(
            torch.where(used, self.token.gather(1, candidate), 0),
            torch.where(used, parent, -1).int(),
            torch.where(used, self.score.gather(1, candidate), _NEVER),
            total[:, 0].clamp(max=N).int(),
            self.shape.max_depth,
        )
