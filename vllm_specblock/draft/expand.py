"""Rank-guided expansion: from the drafter's distributions to a tree (SpecBlock paper, §3.2).

Everything has a shape that the configuration fixes, and no value is read on the host: M blocks
of candidates are laid side by side, most of them marked as not wanted, and one pass at the end
joins equal ones, keeps the best N and puts them in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_specblock.tree import DraftTree

_NEVER = float("-inf")


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
    """

    block_size: int
    num_blocks: int
    num_starts: int
    branching: tuple[int, int, int, int]
    budget: int

    @property
    def width(self) -> int:
        """B, candidates that are looked at per position."""
        return max(1, *self.branching)


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

    Candidate 0 is the root. A block of rows adds rows · K · B candidates, in that order.

    Args:
        width: [4] int64, `shape.branching` on the device, made once by the caller.
    """

    def __init__(self, shape: Shape, width: torch.Tensor, num_requests: int):
        self.shape, self.width = shape, width
        device = width.device
        self.rank = torch.arange(shape.width, device=device)
        zeros = torch.zeros(num_requests, 1, dtype=torch.int64, device=device)
        self.token, self.parent, self.depth, self.path_hash = zeros, zeros, zeros, zeros
        self.row, self.position = zeros, zeros
        self.score = torch.zeros(num_requests, 1, device=device)
        self.may_start = torch.zeros(num_requests, 1, dtype=torch.bool, device=device)
        self.num_rows = 0

    def first_block(
        self, top_logprob: torch.Tensor, top_token: torch.Tensor, bucket: torch.Tensor
    ) -> None:
        """Hang block 1 under the root.

        Args:
            top_logprob: [R, K, B] fp32, best first, normalised over the draft vocabulary.
            top_token: [R, K, B] int64, target vocabulary.
            bucket: [R, K] int64, rank bucket 0 … 3 of each position.
        """
        root = torch.zeros_like(self.token)  # [R, 1]
        everywhere = torch.ones_like(self.may_start)
        self._attach(root, everywhere, top_logprob[:, None], top_token[:, None], bucket[:, None])

    def starts(self, block: int) -> Starts:
        """Choose the S best nodes so far for block `block` ≥ 2; the chain's end is the first.

        A node starts a block at most once.
        """
        S = self.shape.num_starts
        key = torch.where(self.may_start, self.score, _NEVER)
        key = key.scatter(1, self.chain_end, float("inf"))
        key = torch.nn.functional.pad(key, (0, max(0, S - key.shape[1])), value=_NEVER)
        best, node = key.topk(S, dim=1)
        node = node.clamp(max=self.token.shape[1] - 1)
        valid = (best > _NEVER) & (self.score.gather(1, node) > _NEVER)
        self.may_start = self.may_start.scatter(1, node, False)
        return Starts(
            node,
            self.token.gather(1, node),
            self.row.gather(1, node),
            self.position.gather(1, node),
            valid,
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
        self._attach(starts.node, starts.valid, top_logprob, top_token, bucket)

    def _attach(self, start, valid, top_logprob, top_token, bucket) -> None:
        """Add one caterpillar per row: a chain of top-1 tokens, each with its siblings.

        Position k hangs its tokens under the chain's node of position k − 1.

        Args:
            start: [R, rows] int64 candidate; valid: [R, rows] bool.
            top_logprob, top_token: [R, rows, K, B]; bucket: [R, rows, K].
        """
        R, rows, K, B = top_token.shape
        first = self.token.shape[1]
        device = start.device
        scores = [self.score.gather(1, start)]  # of the chain before each position
        hashes = [self.path_hash.gather(1, start)]
        for k in range(K - 1):
            scores.append(_child_score(scores[-1], top_logprob[..., k, 0]))
            hashes.append(_extend(hashes[-1], top_token[..., k, 0]))
        score = _child_score(torch.stack(scores, -1)[..., None], top_logprob)
        wanted = (self.rank < self.width[bucket][..., None]) | (self.rank == 0)
        score = torch.where(wanted & valid[..., None, None], score, _NEVER)

        index = first + torch.arange(rows * K, device=device).view(rows, K) * B
        before = torch.cat([start[..., None], index[:, :-1].expand(R, -1, -1)], -1)
        position = torch.arange(K, device=device)
        depth = self.depth.gather(1, start)[..., None] + position + 1
        path_hash = _extend(torch.stack(hashes, -1)[..., None], top_token)
        starts_here = (self.width[bucket] > 0)[..., None] & (score > _NEVER)
        row = self.num_rows + torch.arange(rows, device=device)[:, None]

        def spread(per_position: torch.Tensor) -> torch.Tensor:
            return per_position[..., None].expand(R, rows, K, B)

        for name, added in (
            ("token", top_token),
            ("parent", spread(before)),
            ("score", score),
            ("depth", spread(depth)),
            ("path_hash", path_hash),
            ("row", spread(row.expand(rows, K))),
            ("position", spread(position)),
            ("may_start", starts_here),
        ):
            setattr(self, name, torch.cat([getattr(self, name), added.reshape(R, -1)], 1))
        self.num_rows += rows
        # The main chain goes on from row 0 of every block, which starts at its last end.
        self.chain_end = torch.full((R, 1), first + (K - 1) * B, device=device)

    def finish(self) -> DraftTree:
        """Join nodes of equal text, keep the best N, put them in order."""
        N = self.shape.budget
        score, order = self.score[:, 1:].sort(dim=1, descending=True, stable=True)
        token = self.token[:, 1:].gather(1, order)
        path_hash = self.path_hash[:, 1:].gather(1, order)
        count = order.shape[1]
        place = torch.arange(count, device=order.device).expand_as(order)

        # Nodes of equal text are neighbours once sorted by hash; the first of them is the best.
        by_hash, to_hash = path_hash.sort(dim=1, stable=True)
        leads = torch.ones_like(by_hash, dtype=torch.bool)
        leads[:, 1:] = by_hash[:, 1:] != by_hash[:, :-1]
        leader = torch.where(leads, place, 0).cummax(dim=1).values
        winner = torch.empty_like(order).scatter_(1, to_hash, to_hash.gather(1, leader))

        kept = (winner == place) & (score > _NEVER)
        node = kept.cumsum(1)  # 1 … number kept
        # A loser's children hang from the winner, whose score is no lower.
        where = torch.empty_like(order).scatter_(1, order, place)
        where = torch.nn.functional.pad(node.gather(1, winner).gather(1, where), (1, 0))
        parent = where.gather(1, self.parent[:, 1:].gather(1, order))

        column = torch.where(kept & (node <= N), node, 0)  # column 0 is cut off again

        def collect(values: torch.Tensor, fill: float) -> torch.Tensor:
            out = values.new_full((len(values), N + 1), fill)
            return out.scatter_(1, column, values)[:, 1:]

        return DraftTree.from_nodes(
            collect(token, 0),
            collect(parent.int(), -1),
            collect(score, _NEVER),
            kept.sum(1).clamp(max=N).int(),
        )


def _child_score(above: torch.Tensor, logprob: torch.Tensor) -> torch.Tensor:
    """Cumulative score, strictly below the parent's even where `logprob` rounds away.

    Sorted by score, parents then come first, whatever else is equal.
    """
    return (above + logprob).minimum(torch.nextafter(above, torch.full_like(above, _NEVER)))


def _extend(path_hash: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Hash of a path one token longer, in wrapping int64 arithmetic.

    Two texts of one hash would be taken for one: a draft in the wrong place, never a wrong
    output, since the target judges the tree as it stands.
    """
    mixed = (path_hash ^ ((token + 1) * -7046029254386353131)) * -4417276706812531889
    return mixed ^ (mixed >> 31)
