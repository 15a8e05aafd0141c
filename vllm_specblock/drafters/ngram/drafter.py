"""N-gram drafter: continuations of the request's own text, as a tree.

Every earlier place whose last tokens are those of the text's end is an occurrence. The best ones
are followed, and weighed as in prediction by partial matching: longer matches and agreement count.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_specblock.candidates import NEVER, select_nodes, tree_of
from vllm_specblock.config import NGramConfig
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.tree import DraftTree
from vllm_specblock.triton_kernels.ngram.continuations import Following, follow_triton
from vllm_specblock.triton_kernels.ngram.continuations_numba import follow_numba
from vllm_specblock.triton_kernels.ngram.occurrences import Texts
from vllm_specblock.triton_kernels.optional_numba import takes

VOTE, POWER = 0.32, 1.2
"""The r-th best occurrence votes VOTE · n^POWER / ⁴√r for what followed it, n being the tokens
that it agrees in, those drafted before included. With the votes V of all that say so, out of P
that agree up to there, a token gets the probability V / P · V / (V + 1).

Fitted by likelihood on held-out source code and a small model's greedy answers.
"""

_VOTES, _NATS = 4096, 1024
"""Votes and scores are multiples of 1/4096 and of 1/1024 nat, few enough for their sums to be
exact in any order: equal texts score the same, and no child scores above its parent."""


def match_lengths(text: torch.Tensor, length: torch.Tensor, most: int) -> torch.Tensor:
    """Count the tokens in which each earlier place agrees with the text's end.

    Args:
        text: [R, L] integers; entries at or beyond `length` are ignored.
        length: [R] int64, tokens of each text; any value is safe.
        most: count no further.

    Returns:
        [R, L] int32: tokens, up to `most`, that agree when going back from place j and from
        the last token; 0 where j is that token or lies behind it.
    """
    width = text.shape[1]
    place = torch.arange(width, device=text.device)
    back = torch.arange(most, device=text.device)
    end = text.gather(1, (length[:, None] - 1 - back).clamp(0, width - 1))  # [R, most]
    agrees = (text == end[:, :1]) & (place < length[:, None] - 1)
    count = agrees.int()
    for i in range(1, min(most, width)):
        agrees = agrees[:, 1:] & (text[:, : width - i] == end[:, i : i + 1])
        count[:, i:] += agrees
    return count


class NGramDrafter(Drafter):
    """Follows the `branches` best occurrences, the longest match first, the latest of equals.

    Args:
        options: what counts as a match, and how far it is followed.
        num_nodes: N.
        max_model_len: tokens of the longest request.
    """

    kind = "ngram"

    def __init__(self, options: NGramConfig, num_nodes: int, max_model_len: int) -> None:
        self.options, self.num_nodes, self.max_model_len = options, num_nodes, max_model_len
        self.max_depth = min(num_nodes, options.depth)
        matches = options.min_match, options.max_match, options.branches
        sizes = self.max_depth, num_nodes
        self.following = Following(*matches, *sizes, VOTE, POWER, _VOTES, _NATS)

    def advance(self, rows: CommittedTokens) -> None:
        self.texts = Texts(
            rows.text[:, : self.max_model_len], rows.req_idx, rows.position, rows.last
        )
        # Bound of every text's length, on the host.
        self.longest = rows.max_position + 2

    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        texts = self.texts
        if requests is not None:
            texts = replace(texts, row=texts.row[requests], last=texts.last[requests])
        if texts.table.is_cuda and self.following.fits:
            return tree_of(follow_triton(texts, self.following))
        if takes(texts.table):
            return tree_of(follow_numba(texts, self.following))
        text = texts.table[:, : self.longest][texts.row]
        return self._tree(*self._occurrences(text, texts.position[texts.last] + 2))

    def _occurrences(
        self, text: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the places to follow, and their continuations.

        Args:
            text: [R, L] int32; length: [R] int64.

        Returns:
            token: [R, B, D] int64, the continuation of each occurrence. Beyond the text's end it
                repeats itself.
            matched: [R, B] int64, length of the match; 0: no occurrence.
        """
        width = text.shape[1]
        count = match_lengths(text, length, self.options.max_match)
        place = torch.arange(width, dtype=torch.int32, device=text.device)
        key = torch.where(count < self.options.min_match, -1, place + count * width)
        key = key.topk(min(self.options.branches, width), dim=1).values
        key = key.clamp(min=0).long()
        place, matched = key % width, key // width
        ahead = torch.arange(self.max_depth, device=text.device)
        period = (length[:, None] - 1 - place).clamp(min=1)
        source = place[..., None] + 1 + ahead % period[..., None]  # [R, B, D]
        token = text.gather(1, source.flatten(1).clamp(max=width - 1))
        return token.view(source.shape).long(), matched

    def _tree(self, token: torch.Tensor, matched: torch.Tensor) -> DraftTree:
        """Join the continuations, [R, B, D] and [R, B] as of `_occurrences`, at shared prefixes.

        A continuation hangs from the first of those that share most with it, where they part.
        """
        branches, depth = token.shape[1:]
        b = torch.arange(branches, device=token.device)
        k = torch.arange(depth, device=token.device)
        agreed = matched[..., None] + k  # [R, B, D]
        rank = (b[:, None] + 1) ** 0.25
        vote = (_VOTES * VOTE * agreed**POWER / rank).round()
        vote = torch.where(matched[..., None] > 0, vote, 0.0)[:, None]

        same = token[:, :, None] == token[:, None]  # [R, B, B, D]
        shared = same.cumprod(-1).sum(-1)  # [R, B, B] tokens
        before = (shared[..., None] >= k) * vote  # of those at a node's parent
        votes = (before * same).sum(2)  # [R, B, D]
        gain = (votes / before.sum(2) * votes / (votes + _VOTES)).log()
        score = (gain * _NATS).round().cumsum(-1) / _NATS

        earlier = torch.where(b < b[:, None], shared, 0)
        parts, leader = earlier.max(-1, keepdim=True)  # [R, B, 1]
        drafted = (matched[..., None] > 0) & (k >= parts)
        owner = torch.where(k == parts, leader, b[:, None])
        # Token k of continuation b is candidate 1 + b·D + k.
        parent = torch.where(k > 0, owner * depth + k, 0)
        return select_nodes(
            token.flatten(1),
            parent.flatten(1),
            torch.where(drafted, score, NEVER).flatten(1),
            (k + 1).repeat(branches),
            None,
            self.num_nodes,
            self.max_depth,
        ).tree
